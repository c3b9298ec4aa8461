# SPDX-License-Identifier: MIT
"""A hook between the model and the sampler: Shakespeare without the letter e.

The hook gets the ids so far and its own copy of the logits, and returns the logits to sample from.  -inf forbids a
token.  A grammar works the same way, with a mask that depends on the ids.
"""

import numpy as np

import k3session as k3

with k3.Model.open() as model, model.session() as s:
    tokenizer = model.tokenizer
    forbidden = np.array([b"e" in tokenizer.token_bytes(i).lower() for i in range(model.config.vocab_size)])

    def without_e(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        logits[forbidden] = -np.inf
        return logits

    s.prefill(tokenizer.encode("HAMLET.\n"))
    sampling = k3.Sampling(temperature=0.5, seed=9, processor=without_e)
    text = "".join(r.text for r in s.generate(60, sampling=sampling))

print(text)
print(f"[{len(text)} characters, {text.lower().count('e')} times the letter e]")
if "e" in text.lower():
    raise SystemExit("the hook was not obeyed")
