"""Says to the file of a benchmark that was written for an older version what it must import now."""

import sys

print(
    "error: plaingpt.evaluation is now plaingpt.scoring; import Benchmark and its helpers from "
    "plaingpt.scoring.benchmark, launch from plaingpt.scoring.program and GPT from model, and end "
    "with launch(BENCHMARK, GPT)",
    file=sys.stderr,
)
sys.exit(2)
