# SPDX-License-Identifier: MIT
"""A session: one timeline of tokens over a model, and everything that can be done with it.

Each file of this folder has one kind of thing, and each class builds on the one before: ``core`` the passes,
``snapshots`` saving and loading, ``branches`` forks, marks and going back, ``drafts`` tokens that are committed later,
``inspection`` what can be seen inside.
"""

from __future__ import annotations

from k3session.session.inspection import Inspection

__all__ = ["Session"]


class Session(Inspection):
    """One mutable timeline over a shared model.

    A session has one owner: a second thread that uses it while it is busy gets `SessionBusyError`.  Sessions of one
    model run in parallel.  Every pass commits at its end or not at all, so a failure, a cancel or Ctrl-C leaves the
    session where it was, or at the end of the last finished chunk of a prefill.

    Parameters
    ----------
    model
        The model; stays open at least as long as the session.
    capacity
        The most tokens that the session may hold.  None is the model's ``max_position_embeddings``.  Memory is taken
        as the session grows, not in advance.
    latent
        How MLA keeps its latent cache: "fp32", or "bf16", half the size, rounded once when a row is appended.
    marks
        When the session marks its position by itself, for `rewind` and `set_tokens`, and the memory for it: a
        `Marks`; None is ``Marks()``, every 256 tokens and at the end of each prefill within 1 GiB; False is never.

    Examples
    --------
    >>> import k3session as k3
    >>> with k3.Model.open() as model, model.session() as s:
    ...     logits = s.prefill([82, 79, 77])
    ...     logits = s.step(int(logits.argmax()))
    ...     s.position
    4
    """
