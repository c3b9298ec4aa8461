# SPDX-License-Identifier: MIT
# NumPy types its reductions and einsum as Any.
# mypy: disable-error-code="no-any-return"
"""Deliberate mistakes, each one a :class:`Reference` with a single decision made wrongly.

The number is that of the trap which the mistake belongs to; docs and tests use the same numbers:

1 eps of the latent norms, 2 eps of the KDA l2norm, 3 A_log is longer than the head count, 4 form of
the decay, 5 one name for two gates, 6 unit of the AttnRes block size, 7 order of mix, bank and restart,
8 AttnRes scores, 10 router, 11 latent norm and weighted sum, 12 SiTU, 13 names of expert matrices,
14 MXFP4, 17 NoPE, 20 state layout, 21 state at a boundary, 22 convolution, 23 parameters kept in F32.
0 is for mistakes that belong to no trap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3session.dtypes import E2M1, bf16_to_f64, e8m0_to_f64, f32_to_bf16
from k3session.reference import LayerState, Reference, State, rms, sigmoid, silu

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Mistake:
    """One wrong implementation.

    `scenario` names the checkpoint on which it shows (see ``test_traps.py``).
    """

    trap: int
    cls: type[Reference]
    scenario: str

    @property
    def id(self) -> str:
        return f"{self.trap}-{self.cls.__name__}"


MISTAKES: list[Mistake] = []


def mistake(trap: int, *, on: str = "golden") -> Callable[[type[Reference]], type[Reference]]:
    def register(cls: type[Reference]) -> type[Reference]:
        MISTAKES.append(Mistake(trap, cls, on))
        return cls

    return register


def bf16(x: Array) -> Array:
    return bf16_to_f64(f32_to_bf16(x))


# ---------------------------------------------------------------- 1, 2: epsilons


@mistake(1)
class LatentNormEpsFromConfig(Reference):
    def latent_norm(self, x: Array, name: str) -> Array:
        return rms(x, self.weight(name), self.config.rms_norm_eps)


@mistake(0)
class EveryNormEps1em6(Reference):
    def norm(self, x: Array, name: str) -> Array:
        return rms(x, self.weight(name), 1e-6)


@mistake(2)
class L2NormEpsOnMean(Reference):
    def l2norm(self, x: Array) -> Array:
        return x / np.sqrt((np.mean(x * x, -1, keepdims=True) + 1e-6) * x.shape[-1])


@mistake(2)
class L2NormEpsAsFloor(Reference):
    def l2norm(self, x: Array) -> Array:
        return x / np.maximum(np.sqrt(np.sum(x * x, -1, keepdims=True)), 1e-5)


@mistake(2)
class L2NormMissing(Reference):
    def l2norm(self, x: Array) -> Array:
        return x


# ---------------------------------------------------------------- 3, 4: decay


def padded_a_log(model: Reference, name: str) -> Array:
    """As the released checkpoint stores it: as long as a head is wide, zero beyond the head count."""
    per_head = model.weight(f"{name}.A_log").ravel()[: model.config.kda_num_heads]
    return np.pad(per_head, (0, model.config.kda_head_dim - len(per_head)))


@mistake(3)
class ALogPerChannel(Reference):
    def a_log(self, name: str) -> Array:
        return np.tile(padded_a_log(self, name), self.config.kda_num_heads)


@mistake(3)
class ALogFromTheEnd(Reference):
    def a_log(self, name: str) -> Array:
        heads = self.config.kda_num_heads
        return np.repeat(padded_a_log(self, name)[-heads:], self.config.kda_head_dim)


@mistake(4)
class DecaySoftplus(Reference):
    def decay_form(self, z: Array, a: Array) -> Array:
        return -a * np.logaddexp(0.0, z)


@mistake(4)
class DecaySoftplusClamped(Reference):
    def decay_form(self, z: Array, a: Array) -> Array:
        return np.maximum(-a * np.logaddexp(0.0, z), -5.0)


@mistake(4)
class DecayWithoutBound(Reference):
    def decay_form(self, z: Array, a: Array) -> Array:
        return -sigmoid(a * z)


@mistake(4)
class DecayRateOutsideTheSigmoid(Reference):
    def decay_form(self, z: Array, a: Array) -> Array:
        return -5.0 * a * sigmoid(z)


@mistake(4)
class DecayRateNotExponentiated(Reference):
    def decay_form(self, z: Array, a: Array) -> Array:
        return -5.0 * sigmoid(np.log(a) * z)


# ---------------------------------------------------------------- 5: the two gates


@mistake(5)
class KdaGateBeforeNorm(Reference):
    def kda_output(self, name: str, o: Array, g: Array) -> Array:
        return self.norm(o * sigmoid(g), f"{name}.o_norm.weight")


@mistake(5)
class KdaGateWithoutNorm(Reference):
    def kda_output(self, name: str, o: Array, g: Array) -> Array:
        return o * sigmoid(g)


@mistake(5)
class KdaGateSilu(Reference):
    def kda_output(self, name: str, o: Array, g: Array) -> Array:
        return self.norm(o, f"{name}.o_norm.weight") * silu(g)


@mistake(5)
class KdaNormOverAllHeads(Reference):
    def kda_output(self, name: str, o: Array, g: Array) -> Array:
        square = np.mean(o * o, (1, 2), keepdims=True)
        weight = self.weight(f"{name}.o_norm.weight")
        return weight * o / np.sqrt(square + self.config.rms_norm_eps) * sigmoid(g)


@mistake(5)
class KdaOutputUngated(Reference):
    def kda_output(self, name: str, o: Array, g: Array) -> Array:
        return self.norm(o, f"{name}.o_norm.weight")


@mistake(5)
class MlaNormBeforeGate(Reference):
    def mla_output(self, name: str, o: Array, x: Array) -> Array:
        return super().mla_output(name, rms(o, 1.0, self.config.rms_norm_eps), x)


@mistake(5)
class MlaGateSilu(Reference):
    def mla_output(self, name: str, o: Array, x: Array) -> Array:
        return o.reshape(len(x), -1) * silu(self.linear(x, f"{name}.g_proj.weight"))


@mistake(5)
class MlaOutputUngated(Reference):
    def mla_output(self, name: str, o: Array, x: Array) -> Array:
        return o.reshape(len(x), -1)


@mistake(5)
class MlaGateReadsUnnormedInput(Reference):
    unnormed: Array

    def enter_attention(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        self.unnormed, s = super().enter_attention(i, bank, s)
        return self.unnormed, s

    def mla_output(self, name: str, o: Array, x: Array) -> Array:
        return super().mla_output(name, o, self.unnormed)


# ---------------------------------------------------------------- 6, 7, 8: Attention Residuals


@mistake(6)
class BlockSizeCountsSubLayers(Reference):
    def enter_attention(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        return self.enter(2 * i, bank, s, f"model.layers.{i}.self_attention_res")

    def enter_ffn(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        return self.enter(2 * i + 1, bank, s, f"model.layers.{i}.mlp_res")

    def enter(self, j: int, bank: list[Array], s: Array, name: str) -> tuple[Array, Array]:
        h = self.mix(bank, s, name)
        if j % self.config.attn_res_block_size == 0:
            bank.append(s)
            s = np.zeros_like(s)
        return h, s


@mistake(6)
class BlockSizeHalved(Reference):
    def starts_block(self, i: int) -> bool:
        return i % (self.config.attn_res_block_size // 2) == 0


@mistake(6)
class BlockSizeDoubled(Reference):
    def starts_block(self, i: int) -> bool:
        return i % (self.config.attn_res_block_size * 2) == 0


@mistake(6)
class BlockEndsALayerEarly(Reference):
    def starts_block(self, i: int) -> bool:
        return i == 0 or (i + 1) % self.config.attn_res_block_size == 0


@mistake(7)
class BanksTheMixedVector(Reference):
    def enter_attention(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        h = self.mix(bank, s, f"model.layers.{i}.self_attention_res")
        if self.starts_block(i):
            bank.append(h)
            s = np.zeros_like(s)
        return h, s


@mistake(7)
class BanksBeforeMixing(Reference):
    def enter_attention(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        if self.starts_block(i):
            bank.append(s)
        h = self.mix(bank, s, f"model.layers.{i}.self_attention_res")
        return h, np.zeros_like(s) if self.starts_block(i) else s


@mistake(7)
class SumNotRestarted(Reference):
    def enter_attention(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        return super().enter_attention(i, bank, s)[0], s


@mistake(7)
class SumRestartsFromTheMix(Reference):
    def enter_attention(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        h, after = super().enter_attention(i, bank, s)
        return h, h if self.starts_block(i) else after


@mistake(7)
class MixReplacesTheSum(Reference):
    def enter_ffn(self, i: int, bank: list[Array], s: Array) -> tuple[Array, Array]:
        h, _ = super().enter_ffn(i, bank, s)
        return h, h


@mistake(7)
class OutputMixMissing(Reference):
    def output(self, bank: list[Array], s: Array) -> Array:
        return super().output([], s)


@mistake(7)
class OutputMixAfterNorm(Reference):
    def output(self, bank: list[Array], s: Array) -> Array:
        normed = [self.norm(x, "model.norm.weight") for x in (*bank, s)]
        return self.linear(self.mix(normed[:-1], normed[-1], "model.output_attn_res"), "lm_head.weight")


@mistake(8)
class MixKeysNotNormed(Reference):
    def mix_keys(self, x: Array) -> Array:
        return x


@mistake(8)
class MixScoresDividedByRootWidth(Reference):
    def mix_query(self, name: str) -> Array:
        return super().mix_query(name) * self.config.hidden_size**-0.5


@mistake(8)
class MixNormWeightIgnored(Reference):
    def mix_query(self, name: str) -> Array:
        return self.weight(f"{name}_proj.weight")[0]


@mistake(8)
class MixFoldedInBf16(Reference):
    def mix_query(self, name: str) -> Array:
        return bf16(super().mix_query(name))


@mistake(8)
class MixOfNormedRows(Reference):
    def mix(self, bank: list[Array], s: Array, name: str) -> Array:
        rows = [self.mix_keys(x) for x in (*bank, s)]
        return super().mix(rows[:-1], rows[-1], name)


# ---------------------------------------------------------------- 10, 11: router and weighted sum


@mistake(10)
class RouterBiasInTheWeights(Reference):
    def router_weights(self, score: Array, biased: Array) -> Array:
        return super().router_weights(biased, biased)


@mistake(10)
class RouterBiasIgnored(Reference):
    def router_bias(self, name: str) -> Array:
        return np.zeros(self.config.num_experts)


@mistake(10, on="raised_bias")
class RouterBiasInBf16(Reference):
    def router_bias(self, name: str) -> Array:
        return bf16(super().router_bias(name))


@mistake(10)
class RouterScoresSoftmax(Reference):
    def router_score(self, name: str, x: Array) -> Array:
        e = np.exp(self.linear(x, f"{name}.gate.weight"))
        return e / e.sum(-1, keepdims=True)


@mistake(10)
class RouterLogitsInBf16(Reference):
    def router_score(self, name: str, x: Array) -> Array:
        return sigmoid(bf16(self.linear(x, f"{name}.gate.weight")))


@mistake(10)
class RouterWeightsInBf16(Reference):
    def router_weights(self, score: Array, biased: Array) -> Array:
        return bf16(super().router_weights(score, biased))


@mistake(11, on="quiet_experts")
class RouterWeightsNotRenormalised(Reference):
    def router_weights(self, score: Array, biased: Array) -> Array:
        return score * self.config.routed_scaling_factor


@mistake(11, on="quiet_experts")
class RouterWeightsNotScaled(Reference):
    def router_weights(self, score: Array, biased: Array) -> Array:
        return super().router_weights(score, biased) / self.config.routed_scaling_factor


@mistake(11, on="quiet_experts")
class ScaledAfterUpProjection(Reference):
    def router_weights(self, score: Array, biased: Array) -> Array:
        return super().router_weights(score, biased) / self.config.routed_scaling_factor

    def routed_output(self, name: str, u: Array) -> Array:
        return super().routed_output(name, u) * self.config.routed_scaling_factor


@mistake(11)
class RoutedNormMissing(Reference):
    def routed_output(self, name: str, u: Array) -> Array:
        return self.linear(u, f"{name}.routed_expert_up_proj.weight")


@mistake(11)
class RoutedNormPerExpert(Reference):
    def expert(self, name: str, z: Array) -> Array:
        return self.norm(super().expert(name, z), name.split("experts")[0] + "routed_expert_norm.weight")

    def routed_output(self, name: str, u: Array) -> Array:
        return self.linear(u, f"{name}.routed_expert_up_proj.weight")


@mistake(11)
class RoutedNormAfterUpProjection(Reference):
    def routed_output(self, name: str, u: Array) -> Array:
        u = u * self.weight(f"{name}.routed_expert_norm.weight")
        return rms(self.linear(u, f"{name}.routed_expert_up_proj.weight"), 1.0, self.config.rms_norm_eps)


# ---------------------------------------------------------------- 12: SiTU


class Activation(Reference):
    """Another activation for the FFNs of one kind, or for all."""

    kinds: tuple[str, ...] = ("dense", "shared", "routed")

    def situ(self, kind: str, g: Array, u: Array) -> Array:
        return self.wrong(g, u) if kind in self.kinds else super().situ(kind, g, u)

    def wrong(self, g: Array, u: Array) -> Array:
        return silu(g) * u


@mistake(12)
class DenseSilu(Activation):
    kinds = ("dense",)


@mistake(12)
class SharedSilu(Activation):
    kinds = ("shared",)


@mistake(12)
class RoutedSilu(Activation):
    kinds = ("routed",)


@mistake(12)
class SigmoidOfTheCappedGate(Activation):
    def wrong(self, g: Array, u: Array) -> Array:
        capped = 4 * np.tanh(g / 4)
        return capped * sigmoid(capped) * 25 * np.tanh(u / 25)


@mistake(12)
class UpBranchUncapped(Activation):
    def wrong(self, g: Array, u: Array) -> Array:
        return 4 * np.tanh(g / 4) * sigmoid(g) * u


@mistake(12)
class UpBranchClamped(Activation):
    def wrong(self, g: Array, u: Array) -> Array:
        return 4 * np.tanh(g / 4) * sigmoid(g) * np.clip(u, -25, 25)


@mistake(12)
class GateClamped(Activation):
    def wrong(self, g: Array, u: Array) -> Array:
        return np.clip(g, -4, 4) * sigmoid(g) * 25 * np.tanh(u / 25)


@mistake(12)
class OneCapForBothBranches(Activation):
    def wrong(self, g: Array, u: Array) -> Array:
        return 4 * np.tanh(g / 4) * sigmoid(g) * 4 * np.tanh(u / 4)


@mistake(12)
class GateAndUpSwapped(Activation):
    kinds = ("dense", "shared")

    def wrong(self, g: Array, u: Array) -> Array:
        return super().situ("swapped", u, g)


# ---------------------------------------------------------------- 13, 14: expert matrices


@mistake(13)
class W1AndW3Swapped(Reference):
    def expert_weight(self, name: str) -> Array:
        swapped = {"w1": "w3", "w3": "w1", "w2": "w2"}
        return super().expert_weight(name[:-2] + swapped[name[-2:]])


@mistake(14)
class NibblesSwapped(Reference):
    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
        return super().decode(((packed << 4) | (packed >> 4)).astype(np.uint8), scale)


@mistake(14)
class NibblesPairedWithTheOtherHalf(Reference):
    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
        block = packed.reshape(len(packed), -1, 16)
        elements = np.concatenate([E2M1[block & 15], E2M1[block >> 4]], -1)
        return (elements * e8m0_to_f64(scale)[:, :, None]).reshape(len(packed), -1)


class Scales(Reference):
    """Another reading of the block scales."""

    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
        one = np.full_like(scale, 127)
        return super().decode(packed, one) * np.repeat(self.wrong(scale), 32, axis=1)

    def wrong(self, scale: NDArray[np.uint8]) -> Array:
        raise NotImplementedError


@mistake(14)
class ScaleBias128(Scales):
    def wrong(self, scale: NDArray[np.uint8]) -> Array:
        return e8m0_to_f64(scale) * 0.5


@mistake(14, on="smallest_scales")
class ScaleCode0IsZero(Scales):
    def wrong(self, scale: NDArray[np.uint8]) -> Array:
        return np.where(scale == 0, 0.0, e8m0_to_f64(scale))


@mistake(14, on="smallest_scales")
class ScaleCode0IsTheSmallestNormal(Scales):
    def wrong(self, scale: NDArray[np.uint8]) -> Array:
        return np.maximum(e8m0_to_f64(scale), 2.0**-126)


@mistake(14, on="smallest_scales")
class SubnormalWeightsFlushed(Reference):
    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
        exact = super().decode(packed, scale)
        return np.where(np.abs(exact) < 2.0**-126, 0.0, exact)


# ---------------------------------------------------------------- 17: NoPE, and the rest of MLA


@mistake(17)
class RotaryAfterAll(Reference):
    def rotate(self, x: Array, positions: NDArray[np.int64]) -> Array:
        angle = positions[..., None] / 10000.0 ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
        first, second = np.split(x, 2, -1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@mistake(17)
class RopeChannelsDropped(Reference):
    def rotate(self, x: Array, positions: NDArray[np.int64]) -> Array:
        return np.zeros_like(x)

    def mla_scale(self) -> float:
        return float(self.config.qk_nope_head_dim**-0.5)


@mistake(17)
class ScaleOfTheNopeChannels(Reference):
    def mla_scale(self) -> float:
        return float(self.config.qk_nope_head_dim**-0.5)


@mistake(17)
class LatentNormOverTheWholeRow(Reference):
    def latent_row(self, name: str, row: Array) -> Array:
        weight = np.ones(row.shape[-1])
        weight[: self.config.kv_lora_rank] = self.weight(f"{name}.kv_a_layernorm.weight")
        return rms(row, weight, self.config.mla_latent_norm_eps)


@mistake(17)
class SharedKeyNormedToo(Reference):
    def latent_row(self, name: str, row: Array) -> Array:
        rank = self.config.kv_lora_rank
        shared = rms(row[:, rank:], 1.0, self.config.mla_latent_norm_eps)
        return np.concatenate([super().latent_row(name, row)[:, :rank], shared], -1)


@mistake(0)
class LatentCachedBeforeTheNorm(Reference):
    def latent_row(self, name: str, row: Array) -> Array:
        return row


@mistake(0)
class AttentionForgetsTheOldestToken(Reference):
    def attend(self, name: str, q_n: Array, q_r: Array, positions: NDArray[np.int64], latent: Array) -> Array:
        if len(latent) == len(positions):
            return super().attend(name, q_n, q_r, positions, latent)
        return super().attend(name, q_n, q_r, positions - 1, latent[1:])


# ---------------------------------------------------------------- 20, 21, 22, 23: Kimi Delta Attention


class Rule(Reference):
    """Another order or form of the recurrence, in terms of S[h, k, v]."""

    def recall(self, state: Array, k: Array) -> Array:
        return np.einsum("hkv,hk->hv", state, k)

    def add(self, state: Array, k: Array, r: Array, beta: Array) -> Array:
        return state + (beta[:, None] * k)[:, :, None] * r[:, None, :]


@mistake(20)
class DecayOverValueChannels(Reference):
    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        ones = np.ones_like(alpha)
        return super().delta_rule(state * alpha[:, None, :], q, k, v, ones, beta)


@mistake(20)
class StateTransposedInTheRule(Reference):
    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        state = alpha[:, :, None] * state
        r = v - np.einsum("hkv,hv->hk", state, k)
        state = state + (beta[:, None] * k)[:, :, None] * r[:, None, :]
        return state, np.einsum("hkv,hv->hk", state, q)


@mistake(20)
class StateTransposedBetweenPrefillAndStep(Reference):
    def forward(self, tokens: Any, state: State, **options: Any) -> Array:
        if state.position == 15:
            for layer in state.layers:
                layer.state = np.ascontiguousarray(np.swapaxes(layer.state, 1, 2))
        return super().forward(tokens, state, **options)


@mistake(0)
class DecayAfterTheUpdate(Rule):
    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        state = alpha[:, :, None] * self.add(state, k, v - self.recall(state, k), beta)
        return state, self.recall(state, q)


@mistake(0)
class RecallFromTheUndecayedState(Rule):
    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        state = self.add(alpha[:, :, None] * state, k, v - self.recall(state, k), beta)
        return state, self.recall(state, q)


@mistake(0)
class ReadsTheOldState(Rule):
    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        state = alpha[:, :, None] * state
        return self.add(state, k, v - self.recall(state, k), beta), self.recall(state, q)


@mistake(0)
class NothingIsRecalled(Rule):
    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        state = self.add(alpha[:, :, None] * state, k, v, beta)
        return state, self.recall(state, q)


@mistake(0)
class ValuesNormalised(Reference):
    def delta_rule(
        self, state: Array, q: Array, k: Array, v: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Array]:
        return super().delta_rule(state, q, k, self.l2norm(v), alpha, beta)


@mistake(0)
class BetaDoubled(Reference):
    def beta(self, name: str, x: Array) -> Array:
        return 2 * super().beta(name, x)


@mistake(0)
class QueryNotScaled(Reference):
    def kda_query(self, q: Array) -> Array:
        return self.l2norm(q)


@mistake(21)
class ConvWindowOneTokenLate(Reference):
    def short_conv(self, name: str, raw: Array, window: Array) -> Array:
        rows = np.concatenate([window, raw])
        y = super().short_conv(name, raw, window)
        window[:] = rows[len(raw) - 1 : -1]
        return y


@mistake(21)
class ConvWindowNotKept(Reference):
    def short_conv(self, name: str, raw: Array, window: Array) -> Array:
        return super().short_conv(name, raw, np.zeros_like(window))


@mistake(21)
class StateNotKept(Reference):
    def kda(self, name: str, x: Array, layer: LayerState) -> Array:
        layer.state = np.zeros_like(layer.state)
        return super().kda(name, x, layer)


@mistake(22)
class ConvTapsReversed(Reference):
    def read(self, name: str) -> Array:
        array = super().read(name)
        return array[..., ::-1] if "_conv1d" in name else array


@mistake(22)
class ConvWindowAfterSilu(Reference):
    def short_conv(self, name: str, raw: Array, window: Array) -> Array:
        old = window.copy()
        y = super().short_conv(name, raw, window)
        window[:] = np.concatenate([old, y])[len(raw) :]
        return y


@mistake(22)
class ConvWithoutSilu(Reference):
    def short_conv(self, name: str, raw: Array, window: Array) -> Array:
        rows = np.concatenate([window, raw])
        super().short_conv(name, raw, window)
        taps = self.weight(f"{name}_conv1d.weight")[:, 0]
        return np.sum([taps[:, j] * rows[j : j + len(raw)] for j in range(taps.shape[1])], 0)


class InBf16(Reference):
    """A float32 parameter rounded to BF16 at load."""

    rounded = ""

    def read(self, name: str) -> Array:
        array = super().read(name)
        return bf16(array) if name.endswith(self.rounded) else array


@mistake(23)
class ALogInBf16(InBf16):
    rounded = ".A_log"


@mistake(23)
class DtBiasInBf16(InBf16):
    rounded = ".dt_bias"


@mistake(23)
class ConvInBf16(InBf16):
    rounded = "_conv1d.weight"


@mistake(23)
class ONormInBf16(InBf16):
    rounded = ".o_norm.weight"
