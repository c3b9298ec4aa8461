# SPDX-License-Identifier: MIT
from libc.stdint cimport int32_t, int64_t

from k3session._core.c_ops cimport k3_dims, k3_layer, k3_matrix


cdef struct Tables:                     # all weights as the ops of one side take them, the host's or a device's
    k3_layer* layers                    # [num_hidden_layers]
    k3_matrix* experts                  # [MoE layers, 3, num_experts]: w1, w2, w3
    k3_matrix embed_tokens              # [vocab, hidden]
    k3_matrix lm_head                   # [vocab, hidden]; the embedding's own bytes when tied
    const float* norm                   # [hidden]
    const float* output_attn_res        # [hidden] output_attn_res_norm * output_attn_res_proj
    const double* frequencies           # [qk_rope_head_dim / 2] of the rotary variant, else NULL


cdef class Weights:
    cdef k3_dims dims
    cdef Tables tables                  # where the checkpoint has them
    cdef list _keep                     # every array whose memory the pointers above name
    cdef int64_t beside                 # bytes of recoded matrices that are not in their rows
    cdef readonly object config         # K3Config
    cdef readonly int64_t first, end    # the layers that are here: first <= i < end

    cdef const float* _vector(self, array) except NULL
    cdef k3_matrix _matrix(self, checkpoint, str name, rows, cols, bint packed=*) except *
    cdef int _bind_layer(self, checkpoint, int i, int32_t mixer_index, int64_t moe_index) except -1
