# SPDX-License-Identifier: MIT
"""One process writes and is killed with SIGKILL; another takes up the same text, to the letter.

The writer saves the session after every token.  A save is atomic, so whatever moment the kill hits, the file is a
whole snapshot.  It holds the seed as well, and a draw depends on nothing but seed, position and logits.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import k3session as k3

PROMPT, KILL_AFTER, MORE = "ROMEO.\n", 25, 40
SAMPLING = k3.Sampling(temperature=0.7, seed=5)


def write(path: str) -> None:
    with k3.Model.open() as model, model.session() as s:
        s.prefill(model.tokenizer.encode(PROMPT))
        for r in s.generate(sampling=SAMPLING):
            s.save(path)
            print(r.position, flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, k3.Model.open() as model:
        path = str(Path(folder) / "play.k3s")
        with subprocess.Popen([sys.executable, __file__, path], stdout=subprocess.PIPE, text=True) as writer:
            for count, _ in enumerate(writer.stdout or (), 1):
                if count == KILL_AFTER:
                    writer.kill()
                    break

        prompt = model.tokenizer.encode(PROMPT)
        with k3.Session.load(model, path) as s:
            saved = s.tokens[len(prompt) :].tolist()
            print(f"killed with {len(saved)} tokens saved; resume is {s.resume}\n")
            rest = [r.token for r in s.generate(MORE)]  # the sampling comes with the file

        with model.session() as s:
            s.prefill(prompt)
            undisturbed = [r.token for r in s.generate(len(saved) + MORE, sampling=SAMPLING)]

        print(model.tokenizer.decode(saved) + " || " + model.tokenizer.decode(rest))
        if saved + rest != undisturbed:
            raise SystemExit("the text differs from that of an undisturbed run")
        print(f"\nThe same {len(undisturbed)} tokens as without the kill.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    else:
        main()
