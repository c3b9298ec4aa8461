# SPDX-License-Identifier: MIT
"""``python -m k3session`` is the command line."""

import sys

from k3session.cli import main

sys.exit(main())
