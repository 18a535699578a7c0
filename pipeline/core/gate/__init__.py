"""Whether a candidate may replace the model in production."""

from pipeline.core.gate.baselines import Baseline
from pipeline.core.gate.config import GateConfig
from pipeline.core.gate.judge import judge
from pipeline.core.gate.verdict import GateCheck, Verdict

__all__ = ["Baseline", "GateCheck", "GateConfig", "Verdict", "judge"]
