"""python -m bench.papers validate|sosp|osdi|smoe"""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
