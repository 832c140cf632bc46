"""Operators of data pipelines: they clean, filter and change problems before they are sampled (task side, in the
feeder), and groups before they are trained on (experience side, in the buffer).

To add one: a module with a class that has a `Config` and keeps `base.TaskOperator` or `base.ExperienceOperator`, and a
line here that says its side. It is built as `Class(config: Class.Config)`, once for each place in the run file that
names it. Its answer must depend on its arguments alone: every decision can be computed again from the log.
"""

from rftstream.config.part_specs import OperatorSpec

OPERATORS = {
    "length": OperatorSpec("rftstream.data.operators.length:Length"),
    "regex": OperatorSpec("rftstream.data.operators.regex:Regex"),
    "solve_rate": OperatorSpec("rftstream.data.operators.solve_rate:SolveRate"),
    "budget": OperatorSpec("rftstream.data.operators.budget:Budget"),
    "dedupe": OperatorSpec("rftstream.data.operators.dedupe:Dedupe"),
    "curriculum": OperatorSpec("rftstream.data.operators.curriculum:Curriculum"),
    "mixture": OperatorSpec("rftstream.data.operators.mixture:Mixture"),
    "language": OperatorSpec("rftstream.data.operators.language:LanguageFilter"),
    "truncated": OperatorSpec("rftstream.data.operators.truncated:Truncated", side="experience"),
    "repetition": OperatorSpec("rftstream.data.operators.repetition:Repetition", side="experience"),
    "zero_variance": OperatorSpec("rftstream.data.operators.zero_variance:ZeroVariance", side="experience"),
    "stale": OperatorSpec("rftstream.data.operators.stale:Stale", side="experience", by_version=True),
    "outliers": OperatorSpec("rftstream.data.operators.outliers:Outliers", side="experience"),
    "gibberish": OperatorSpec("rftstream.data.operators.gibberish:Gibberish", side="experience"),
    "shape": OperatorSpec("rftstream.data.operators.shape:ShapeReward", side="experience"),
    "amplify": OperatorSpec("rftstream.data.operators.amplify:Amplify", side="experience"),
    "priority": OperatorSpec("rftstream.data.operators.priority:Priority", side="experience"),
    "replay": OperatorSpec("rftstream.data.operators.replay:ReplayGroups", side="experience"),
    "hindsight": OperatorSpec("rftstream.data.operators.hindsight:Hindsight", side="experience"),
}
