# SPDX-License-Identifier: MIT
# NumPy types its reductions and einsum as Any.
# mypy: disable-error-code="no-any-return"
"""Kimi K3 in float64 NumPy: the model for people to read and for tests to believe.

One method per decision of the model, in the order in which a token meets them and under the
names of the checkpoint.  Nothing here is fast; everything is exact to about 1e-15.  Rows of a
pass are tokens, so a shape ``[n, ...]`` starts with the tokens of this call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from k3session.config import L2_NORM_EPS, ROUTER_EPS
from k3session.dtypes import mxfp4_to_f64, to_f64
from k3session.errors import InvalidTokenError

if TYPE_CHECKING:
    from k3session.checkpoint import Checkpoint

__all__ = ["LayerState", "Reference", "State", "rms", "sigmoid", "silu", "softmax"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow on either side."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x: Array, weight: Array | float, eps: float) -> Array:
    """RMSNorm over the last axis; eps is added to the mean of squares."""
    return weight * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


@dataclass(slots=True)
class LayerState:
    """What one layer remembers: KDA has `conv` and `state`, MLA has `latent`; the rest is empty."""

    conv: Array  # [3, K-1, H*D]: the last raw projections of q, k, v, oldest first
    state: Array  # [H, D, D]: head, key channel, value channel
    latent: Array  # [tokens, kv_lora_rank + qk_rope_head_dim]


@dataclass(slots=True)
class State:
    """A timeline: the number of tokens seen, and what each layer remembers of them."""

    position: int
    layers: list[LayerState]


class Reference:
    """The K3 graph over an open checkpoint.

    Parameters
    ----------
    checkpoint
        An open :class:`~k3session.checkpoint.Checkpoint`; it must stay open.
    mla_absorbed
        Score against the latent rows instead of expanding them to keys and values.  The same numbers.
    keep_weights
        Keep each matrix widened after its first use: 4 to 16 times the size of the checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, mla_absorbed: bool = False, keep_weights: bool = True
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self._names = frozenset(checkpoint.names)
        self.mla_absorbed = mla_absorbed
        self._kept: dict[str, Array] | None = {} if keep_weights else None
        self._taps: dict[str, list[NDArray[Any]]] = {}

    # ---------------------------------------------------------------- weights

    def weight(self, name: str) -> Array:
        """The tensor `name`, widened; an expert matrix is decoded."""
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        array = self.read(name)
        if self._kept is not None:
            self._kept[name] = array
        return array

    def read(self, name: str) -> Array:
        """The tensor `name` from the checkpoint."""
        stored = self.checkpoint.tensor(name)
        if name.endswith("_packed"):
            return self.decode(stored, self.checkpoint.tensor(name.removesuffix("_packed") + "_scale"))
        return to_f64(stored)

    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
        """Packed expert weights are MXFP4."""
        return mxfp4_to_f64(packed, scale)

    def linear(self, x: Array, name: str) -> Array:
        """y = W x for each row of x; weights are [out, in], nothing has a bias."""
        return x @ self.weight(name).T

    def norm(self, x: Array, name: str) -> Array:
        """RMSNorm with the eps of the config: all norms but the two of MLA's latents."""
        return rms(x, self.weight(name), self.config.rms_norm_eps)

    # ---------------------------------------------------------------- the whole model

    def new_state(self) -> State:
        """A timeline at position 0: histories empty, everything before the first token zero."""
        c = self.config
        heads, dim, width = c.kda_num_heads, c.kda_head_dim, c.kv_lora_rank + c.qk_rope_head_dim
        layers = []
        for i in range(c.num_hidden_layers):
            h = heads if c.is_kda(i) else 0
            conv = np.zeros((3, c.short_conv_kernel_size - 1, h * dim))
            layers.append(LayerState(conv, np.zeros((h, dim, dim)), np.zeros((0, 0 if h else width))))
        return State(0, layers)

    def forward(
        self,
        tokens: Sequence[int] | NDArray[Any] | None,
        state: State,
        *,
        routes: NDArray[Any] | None = None,
        taps: dict[str, Any] | None = None,
        embeddings: NDArray[Any] | None = None,
    ) -> Array:
        """Decode n tokens and append them to `state`.

        Parameters
        ----------
        tokens
            n token ids; None when `embeddings` is given.
        state
            The timeline; it moves on by n tokens.
        routes
            int[n, layers, num_experts_per_token]: take these experts instead of the router's choice.
            Their weights are still computed.  The rows of dense layers are ignored.
        taps
            Filled with the values inside this call, each [n, ...] or, where a layer has one, [n, layers
            of that kind, ...].  `margin` is the gap between the score of the last expert chosen and of
            the first one left out.
        embeddings
            float[n, hidden_size] in place of the rows of the embedding table.

        Returns
        -------
        float64[n, vocab_size] logits.
        """
        self._taps = {}
        s = self.embed(tokens) if embeddings is None else np.array(embeddings, np.float64)
        self.tap("embed", s)
        bank: list[Array] = []
        for i, layer in enumerate(state.layers):
            s = self.layer(i, bank, s, state.position, layer, None if routes is None else routes[:, i])
        state.position += len(s)
        logits = self.output(bank, s)
        if taps is not None:
            whole = {"embed", "final_mix", "final_normed"}
            taps.update((k, v[0] if k in whole else np.stack(v, 1)) for k, v in self._taps.items())
            taps["bank"] = np.stack(bank, 1)
        return logits

    def tap(self, name: str, value: NDArray[Any]) -> None:
        """Keep an inner value of this call for `taps`."""
        self._taps.setdefault(name, []).append(value)

    def embed(self, tokens: Sequence[int] | NDArray[Any] | None) -> Array:
        """The token's row of the embedding table, unscaled."""
        ids = np.asarray(tokens if tokens is not None else [])
        vocab = self.config.vocab_size
        integers = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
        if not integers or ids.min() < 0 or ids.max() >= vocab:
            raise InvalidTokenError(
                f"expected a sequence of one or more token ids from 0 to {vocab - 1}, found {tokens!r}"
            )
        return to_f64(self.checkpoint.tensor("model.embed_tokens.weight")[ids])

    def layer(
        self, i: int, bank: list[Array], s: Array, position: int, layer: LayerState, routes: Ints | None
    ) -> Array:
        """One decoder layer: the running sum s before it -> after it."""
        name = f"model.layers.{i}"
        h, s = self.enter_attention(i, bank, s)
        self.tap("attn_in", h)
        x = self.norm(h, f"{name}.input_layernorm.weight")
        self.tap("attn_x", x)
        if self.config.is_kda(i):
            a = self.kda(f"{name}.self_attn", x, layer)
        else:
            a = self.mla(f"{name}.self_attn", x, position, layer)
        self.tap("attn_out", a)
        s = s + a
        h, s = self.enter_ffn(i, bank, s)
        self.tap("ffn_in", h)
        x = self.norm(h, f"{name}.post_attention_layernorm.weight")
        self.tap("ffn_x", x)
        if self.config.is_moe(i):
            f = self.moe(f"{name}.block_sparse_moe", x, routes)
        else:
            f = self.dense(f"{name}.mlp", x)
        self.tap("ffn_out", f)
        s = s + f
        self.tap("layer_out", s)
        return s

    def output(self, bank: list[Array], s: Array) -> Array:
        """One last mix, the norm, the head: no scaling and no cap on the logits."""
        h = self.mix(bank, s, "model.output_attn_res")
        self.tap("final_mix", h)
        y = self.norm(h, "model.norm.weight")
        self.tap("final_normed", y)
        return self.linear(y, "lm_head.weight")

    # ---------------------------------------------------------------- Attention Residuals

    def starts_block(self, i: int) -> bool:
        """The block size counts decoder layers, not sub-layers."""
        return i % self.config.attn_res_block_size == 0

    def enter_attention(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        """Input of layer i's attention, and the sum that its output is added to.

        At the start of a block, in this order: mix, bank the raw sum, restart the sum.
        """
        h = self.mix(bank, s, f"model.layers.{i}.self_attention_res")
        if self.starts_block(i):
            bank.append(s)
            s = np.zeros_like(s)
        return h, s

    def enter_ffn(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        """Input of layer i's FFN, and the sum that its output is added to."""
        return self.mix(bank, s, f"model.layers.{i}.mlp_res"), s

    def mix(self, bank: list[Array], s: Array, name: str) -> Array:
        """Softmax-weighted sum of the banked rows and s, all as they are; s itself when nothing is banked.

        The result is only ever an input to a sub-layer: it never replaces the running sum.
        """
        x = np.stack([*bank, s], 1)  # [n, sources, hidden]
        score = self.mix_keys(x) @ self.mix_query(name)
        return np.einsum("ns,nsd->nd", softmax(score), x)

    def mix_keys(self, x: Array) -> Array:
        """What the scores see of the sources."""
        return rms(x, 1.0, self.config.rms_norm_eps)

    def mix_query(self, name: str) -> Array:
        """Norm weight and projection are one vector; scores are not divided by the root of the width."""
        return self.weight(f"{name}_norm.weight") * self.weight(f"{name}_proj.weight")[0]

    # ---------------------------------------------------------------- Kimi Delta Attention

    def kda(self, name: str, x: Array, layer: LayerState) -> Array:
        """Linear attention: a matrix per head that decays by key channel and learns by the delta rule."""
        heads, dim = self.config.kda_num_heads, self.config.kda_head_dim
        q, k, v = (
            self.short_conv(f"{name}.{p}", self.linear(x, f"{name}.{p}_proj.weight"), layer.conv[j])
            for j, p in enumerate("qkv")
        )
        self.tap("kda_q_conv", q)
        self.tap("kda_k_conv", k)
        self.tap("kda_v_conv", v)
        q, k, v = (t.reshape(-1, heads, dim) for t in (q, k, v))
        q, k = self.kda_query(q), self.l2norm(k)
        log_decay = self.log_decay(name, x).reshape(-1, heads, dim)
        beta = self.beta(name, x)
        o = np.empty_like(v)
        for t in range(len(x)):
            layer.state, o[t] = self.delta_rule(layer.state, q[t], k[t], v[t], np.exp(log_decay[t]), beta[t])
        self.tap("kda_o", o)
        o = self.kda_output(name, o, self.linear(x, f"{name}.g_proj.weight").reshape(o.shape))
        self.tap("kda_on", o)
        return self.linear(o.reshape(len(x), -1), f"{name}.o_proj.weight")

    def short_conv(self, name: str, raw: Array, window: Array) -> Array:
        """Causal depthwise convolution, then SiLU.  `window` holds raw rows, and is moved on in place."""
        rows = np.concatenate([window, raw])
        taps = self.weight(f"{name}_conv1d.weight")[:, 0]  # [channels, K]; the last one takes row t itself
        y = np.sum([taps[:, j] * rows[j : j + len(raw)] for j in range(taps.shape[1])], 0)
        window[:] = rows[len(raw) :]
        return silu(y)

    def l2norm(self, x: Array) -> Array:
        """Unit length; eps is added to the sum of squares."""
        return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + L2_NORM_EPS)

    def kda_query(self, q: Array) -> Array:
        """The scale matters although a norm follows: the outputs are small beside that norm's eps."""
        return self.l2norm(q) * self.config.kda_head_dim**-0.5

    def log_decay(self, name: str, x: Array) -> Array:
        """Logarithm of the factor that each key channel keeps, [n, H*D]: negative."""
        graw = self.linear(self.linear(x, f"{name}.f_a_proj.weight"), f"{name}.f_b_proj.weight")
        self.tap("kda_graw", graw)
        return self.decay_form(graw + self.weight(f"{name}.dt_bias"), np.exp(self.a_log(name)))

    def a_log(self, name: str) -> Array:
        """One value per head, repeated over its channels.  A stored vector may go on with padding."""
        per_head = self.weight(f"{name}.A_log").ravel()[: self.config.kda_num_heads]
        return np.repeat(per_head, self.config.kda_head_dim)

    def decay_form(self, z: Array, a: Array) -> Array:
        """K3's bound is the range of a sigmoid, not a clamp; without one it is a softplus."""
        if self.config.gate_lower_bound is None:
            return -a * np.logaddexp(0.0, z)  # softplus
        return self.config.gate_lower_bound * sigmoid(a * z)

    def beta(self, name: str, x: Array) -> Array:
        """How far the state goes towards the new value: one number from 0 to 1 per head."""
        braw = self.linear(x, f"{name}.b_proj.weight")
        self.tap("kda_braw", braw)
        return sigmoid(braw)

    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        """One token: forget, correct what the key recalls, then read the updated state."""
        state = alpha[:, :, None] * state
        r = v - np.einsum("hkv,hk->hv", state, k)
        state = state + (beta[:, None] * k)[:, :, None] * r[:, None, :]
        return state, np.einsum("hkv,hk->hv", state, q)

    def kda_output(self, name: str, o: Array, g: Array) -> Array:
        """Norm per head (one weight for all heads), then the gate."""
        return self.norm(o, f"{name}.o_norm.weight") * sigmoid(g)

    # ---------------------------------------------------------------- Multi-head Latent Attention

    def mla(self, name: str, x: Array, position: int, layer: LayerState) -> Array:
        """Softmax attention whose keys and values come from one cached latent row per token."""
        c = self.config
        q = self.latent_norm(self.linear(x, f"{name}.q_a_proj.weight"), f"{name}.q_a_layernorm.weight")
        q = self.linear(q, f"{name}.q_b_proj.weight")
        self.tap("mla_q", q)
        q = q.reshape(len(x), c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
        row = self.linear(x, f"{name}.kv_a_proj_with_mqa.weight")
        self.tap("mla_kva", row)
        row = self.latent_row(name, row)
        self.tap("mla_latent", row[:, : c.kv_lora_rank])
        positions = np.arange(position, position + len(x))
        q_r = self.rotate(q[..., c.qk_nope_head_dim :], positions[:, None])
        k_r = self.rotate(row[:, c.kv_lora_rank :], positions)
        layer.latent = np.concatenate([layer.latent, np.concatenate([row[:, : c.kv_lora_rank], k_r], -1)])
        o = self.attend(name, q[..., : c.qk_nope_head_dim], q_r, positions, layer.latent)
        o = self.mla_output(name, o, x)
        self.tap("mla_gated", o)
        return self.linear(o, f"{name}.o_proj.weight")

    def latent_norm(self, x: Array, name: str) -> Array:
        """These two norms have an eps of their own."""
        return rms(x, self.weight(name), self.config.mla_latent_norm_eps)

    def latent_row(self, name: str, row: Array) -> Array:
        """The row that is cached: the norm covers the latent only, the shared key stays as it is."""
        rank = self.config.kv_lora_rank
        c = self.latent_norm(row[:, :rank], f"{name}.kv_a_layernorm.weight")
        return np.concatenate([c, row[:, rank:]], -1)

    def rotate(self, x: Array, positions: Ints) -> Array:
        """Rotary embedding of the last axis; K3 has none (NoPE) but keeps these channels."""
        if self.config.mla_use_nope:
            return x
        dim = x.shape[-1]
        angle = positions[..., None] / self.config.rope_theta ** (np.arange(0, dim, 2) / dim)
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def mla_scale(self) -> float:
        """The channels without rotation still count."""
        return float((self.config.qk_nope_head_dim + self.config.qk_rope_head_dim) ** -0.5)

    def attend(self, name: str, q_n: Array, q_r: Array, positions: Ints, latent: Array) -> Array:
        """Causal attention over all rows of the cache -> [n, heads, v_head_dim]."""
        c = self.config
        kv_b = self.weight(f"{name}.kv_b_proj.weight")
        kv_b = kv_b.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        w_k, w_v = kv_b[:, : c.qk_nope_head_dim], kv_b[:, c.qk_nope_head_dim :]
        rows, k_r = latent[:, : c.kv_lora_rank], latent[:, c.kv_lora_rank :]
        if self.mla_absorbed:
            q_c = np.einsum("nhk,hkc->nhc", q_n, w_k)
            score = np.einsum("nhc,tc->nht", q_c, rows)
        else:
            score = np.einsum("nhk,thk->nht", q_n, np.einsum("hkc,tc->thk", w_k, rows))
        score = (score + np.einsum("nhr,tr->nht", q_r, k_r)) * self.mla_scale()
        future = np.arange(len(latent)) > positions[:, None]
        p = softmax(np.where(future[:, None, :], -np.inf, score))
        if self.mla_absorbed:
            return np.einsum("nhc,hvc->nhv", np.einsum("nht,tc->nhc", p, rows), w_v)
        return np.einsum("nht,thv->nhv", p, np.einsum("hvc,tc->thv", w_v, rows))

    def mla_output(self, name: str, o: Array, x: Array) -> Array:
        """The gate reads the layer's normed input; no norm comes between."""
        o = o.reshape(len(x), -1)
        if self.config.mla_use_output_gate:
            o = o * sigmoid(self.linear(x, f"{name}.g_proj.weight"))
        return o

    # ---------------------------------------------------------------- feed-forward

    def situ(self, kind: str, g: Array, u: Array) -> Array:
        """SiTU-GLU: both branches are capped by a tanh, the sigmoid takes the uncapped gate.

        `kind` is "dense", "shared" or "routed"; K3 uses the same function for all.
        """
        b, lb = self.config.activation_situ_beta, self.config.activation_situ_linear_beta
        return b * np.tanh(g / b) * sigmoid(g) * (lb * np.tanh(u / lb))

    def mlp(self, name: str, x: Array, kind: str) -> Array:
        """The dense MLP, or the shared experts as one wide MLP."""
        g, u = self.linear(x, f"{name}.gate_proj.weight"), self.linear(x, f"{name}.up_proj.weight")
        return self.linear(self.situ(kind, g, u), f"{name}.down_proj.weight")

    def dense(self, name: str, x: Array) -> Array:
        """The FFN of the first layers."""
        none = np.full((len(x), self.config.num_experts_per_token), -1)
        self.tap("route_ids", none)
        self.tap("route_wts", np.zeros(none.shape))
        self.tap("margin", np.full(len(x), np.inf))
        return self.mlp(name, x, "dense")

    def moe(self, name: str, x: Array, routes: Ints | None) -> Array:
        """Latent mixture of experts: the router and the shared experts see x, the routed ones a latent."""
        ids, weights = self.route(name, x, routes)
        z = self.linear(x, f"{name}.routed_expert_down_proj.weight")
        self.tap("moe_latent_in", z)
        u = self.experts(name, z, ids, weights)
        self.tap("moe_agg", u)
        routed = self.routed_output(name, u)
        self.tap("moe_routed", routed)
        shared = self.mlp(f"{name}.shared_experts", x, "shared")
        self.tap("moe_shared", shared)
        return routed + shared

    def route(self, name: str, x: Array, routes: Ints | None) -> tuple[Ints, Array]:
        """Expert ids and weights, [n, num_experts_per_token], the heaviest first."""
        top = self.config.num_experts_per_token
        score = self.router_score(name, x)
        biased = score + self.router_bias(name)
        order = np.argsort(-biased, axis=-1, kind="stable")
        ranked = np.take_along_axis(biased, order, -1)
        left_out = ranked[:, top] if top < ranked.shape[1] else -np.inf
        self.tap("margin", ranked[:, top - 1] - left_out)
        ids = order[:, :top] if routes is None else np.asarray(routes, np.int64)
        weights = self.router_weights(np.take_along_axis(score, ids, -1), np.take_along_axis(biased, ids, -1))
        heaviest = np.argsort(-weights, axis=-1, kind="stable")
        ids, weights = np.take_along_axis(ids, heaviest, -1), np.take_along_axis(weights, heaviest, -1)
        self.tap("route_ids", ids)
        self.tap("route_wts", weights)
        return ids, weights

    def router_score(self, name: str, x: Array) -> Array:
        """A sigmoid for each expert, of the full-width input."""
        return sigmoid(self.linear(x, f"{name}.gate.weight"))

    def router_bias(self, name: str) -> Array:
        """Added to the scores for the choice."""
        return self.weight(f"{name}.gate.e_score_correction_bias")

    def router_weights(self, score: Array, biased: Array) -> Array:
        """The bias chooses; the weights come from the scores without it."""
        weights = score
        if self.config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + ROUTER_EPS)
        return weights * self.config.routed_scaling_factor

    def experts(self, name: str, z: Array, ids: Ints, weights: Array) -> Array:
        """Weighted sum of the chosen experts' outputs, in the latent."""
        u = np.zeros_like(z)
        for e in np.unique(ids):
            row, slot = np.nonzero(ids == e)
            u[row] += weights[row, slot, None] * self.expert(f"{name}.experts.{e}", z[row])
        return u

    def expert(self, name: str, z: Array) -> Array:
        """w1 is the gate, w3 the up projection, w2 the down projection."""
        g, u = z @ self.expert_weight(f"{name}.w1").T, z @ self.expert_weight(f"{name}.w3").T
        return self.situ("routed", g, u) @ self.expert_weight(f"{name}.w2").T

    def expert_weight(self, name: str) -> Array:
        """Packed or plain: the stored tensors decide, not the quantisation section of the config."""
        if f"{name}.weight" in self._names:
            return self.weight(f"{name}.weight")
        return self.weight(f"{name}.weight_packed")

    def routed_output(self, name: str, u: Array) -> Array:
        """The norm is on the sum, before the up-projection: it hides a common factor of the weights."""
        if self.config.latent_moe_use_norm:
            u = self.norm(u, f"{name}.routed_expert_norm.weight")
        return self.linear(u, f"{name}.routed_expert_up_proj.weight")
