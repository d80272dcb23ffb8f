"""A file of tuned plans that an older version wrote, with its names of the fields, is still
read."""

from __future__ import annotations

import json
from pathlib import Path

from pykernels.env import env
from pykernels.gpu.plans.tuned import tuned_plan


def test_older_names_of_fields_are_read(tmp_path: Path) -> None:
    plan = {"block_m": 16, "block_n": 64, "block_k": 64, "warps": 8, "stages": 2}
    line = {"device": "a GPU", "op": "gate_up", "path": "bf16", "rows": 16, "N": 64, "K": 64}
    (tmp_path / "gpu-plans.json").write_text(json.dumps([{**line, "plan": plan}]))
    with env.override(cache_dir=tmp_path):
        fields = tuned_plan("gate_up", "bf16", "a GPU", 16, 64, 64)
    assert fields is not None
    assert (fields["num_warps"], fields["num_stages"]) == (8, 2)
