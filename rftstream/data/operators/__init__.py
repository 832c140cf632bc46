"""Operators of data pipelines. They clean, filter and change problems before sampling (task side, in the feeder), and
groups before training (experience side, in the buffer).

To add one, write a module with a class that has a `Config` and implements `base.TaskOperator` or
`base.ExperienceOperator`, and add a line here with its side. The class is built as `Class(config: Class.Config)`, once
for each place in the run file that names it. Its answers must depend only on its arguments: every decision can be
computed again from the log.
"""

from rftstream.config.parts.part_specs import OperatorSpec

OPERATORS = {
    "length": OperatorSpec("rftstream.data.operators.texts:Length", by_problem=True),
    "regex": OperatorSpec("rftstream.data.operators.texts:Regex", by_problem=True),
    "solve_rate": OperatorSpec("rftstream.data.operators.draws:SolveRate"),
    "budget": OperatorSpec("rftstream.data.operators.draws:Budget"),
    "dedupe": OperatorSpec("rftstream.data.operators.dedupe:Dedupe", by_problem=True),
    "curriculum": OperatorSpec("rftstream.data.operators.draws:Curriculum"),
    "mixture": OperatorSpec("rftstream.data.operators.draws:Mixture"),
    "language": OperatorSpec("rftstream.data.operators.texts:LanguageFilter", by_problem=True),
    "truncated": OperatorSpec("rftstream.data.operators.leaving_out:Truncated", side="experience"),
    "repetition": OperatorSpec("rftstream.data.operators.leaving_out:Repetition", side="experience"),
    "zero_variance": OperatorSpec("rftstream.data.operators.leaving_out:ZeroVariance", side="experience"),
    "stale": OperatorSpec("rftstream.data.operators.leaving_out:Stale", side="experience", by_version=True),
    "outliers": OperatorSpec("rftstream.data.operators.leaving_out:Outliers", side="experience"),
    "gibberish": OperatorSpec("rftstream.data.operators.leaving_out:Gibberish", side="experience"),
    "shape": OperatorSpec("rftstream.data.operators.weighing:ShapeReward", side="experience"),
    "amplify": OperatorSpec("rftstream.data.operators.weighing:Amplify", side="experience"),
    "priority": OperatorSpec("rftstream.data.operators.weighing:Priority", side="experience"),
    "replay": OperatorSpec("rftstream.data.operators.reuse:ReplayGroups", side="experience"),
    "hindsight": OperatorSpec("rftstream.data.operators.reuse:Hindsight", side="experience"),
}
