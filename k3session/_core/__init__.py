# SPDX-License-Identifier: MIT
"""The compiled core: ops, weights, state and decoder, built from pyx/ and cuda/."""
