// SPDX-License-Identifier: MIT
//
// The embedding row of each token, widened to float32, or the caller's own row where the token is -1
// (zeros where there is none).

#include "dot.h"

namespace K3_NS {

int embed(void*, const k3_dims* dims, const k3_matrix* table, const int32_t* tokens, const float* embeddings, float* s,
          int64_t rows) {
    const int64_t d = dims->hidden_size;
    for (int64_t r = 0; r < rows; ++r) {
        float* out = s + r * d;
        if (tokens[r] < 0) {
            if (embeddings) memcpy(out, embeddings + r * d, (size_t)d * 4);
            else memset(out, 0, (size_t)d * 4);
        } else if (table->dtype == K3_F32) {
            memcpy(out, (const char*)table->data + tokens[r] * table->pitch, (size_t)d * 4);
        } else {
            const char* row = (const char*)table->data + tokens[r] * table->pitch;
            for (int64_t c = 0; c < d; ++c) {
                uint16_t h;                               // the row may lie at an odd address in the file
                memcpy(&h, row + 2 * c, 2);
                out[c] = bf16_to_f32(h);
            }
        }
    }
    return 0;
}

}  // namespace K3_NS
