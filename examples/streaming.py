# SPDX-License-Identifier: MIT
"""Streams text until a stop string, then goes on in the same session with the next speaker."""

import k3session as k3

with k3.Model.open() as model, model.session() as s:
    for speaker in ("ROMEO.\n", "JULIET.\n"):
        print(speaker, end="")
        s.prefill(model.tokenizer.encode(speaker))
        # A speech ends at an empty line.  What could become the stop string is held back until it is clear,
        # so the text that comes out here never contains a part of it.
        for r in s.generate(80, sampling=k3.Sampling(temperature=0.7, seed=7), stop=["\n\n"]):
            print(r.text, end="", flush=True)
        print(f"\n[{r.finish_reason} at position {s.position}]\n")
