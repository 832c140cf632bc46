"""What the heads of the studio's tables mean: the text that a pointer finds over each."""

from __future__ import annotations

from collections.abc import Mapping

_BECAME = "what became of it; below it why"
_DEAD_REASON = "why the role gave up, in a word"

HEADS: Mapping[str, Mapping[str, str]] = {
    "groups": {
        "group": "the problem, what the best and the worst sibling said, id, and when it was admitted (UTC)",
        "became": _BECAME,
        "rewards": "a bar for each sibling, from 0 or the lowest reward to 1 or the highest of this list; × has none",
        "mean": "mean reward of the siblings that were scored",
        "tokens": "mean number of sampled tokens of the siblings",
        "batch": "number of the batch; it leads to the version that the batch made",
    },
    "rollouts": {
        "rollout": "what was asked and said, id, tools; ordered by admission",
        "reward": "reward by which the group was decided",
        "tokens": "number of sampled tokens",
        "version": "version that sampled its first token",
        "became": _BECAME,
    },
    "problems": {
        "problem": "the prompt, what the best and the worst of its newest rollouts said; ordered by taskset and number",
        "answer": "answer that the taskset gives as right",
        "groups": "how often it was given out: the number of its groups",
        "first": "mean reward of its first scored group",
        "newest": "mean reward of its newest scored group",
        "change": "newest minus first: below 0 it was unlearned",
        "mean reward": "mean of the mean rewards of its scored groups",
    },
    "versions": {
        "checkpoint": "version, what the best and the worst rollout of its batch said, and when it was made (UTC)",
        "reward": "mean over the scored rollouts of all groups that were decided since the batch before",
        "loss": "loss of the update",
        "tokens": "number of trained tokens",
        "staleness_max": "versions between the oldest token of the batch and the trainer",
        "step_s": "seconds of training, without waiting and publishing",
        "evaluations": "mean reward of each evaluation of this version",
    },
    "evaluations": {
        "version": "the version that was evaluated, and what its best and worst sample said",
        "metric": "metric over the samples that were scored",
        "samples": "problems × samples of each",
        "unscored": "samples without a reward, which no metric counts",
    },
    "samples": {
        "problem": "the problem and what was said; a click shows all of it",
        "reward": "reward at this version",
        "change": "reward at the first version minus reward at the second",
        "tokens": "number of sampled tokens",
    },
    "kinds of letters": {
        "reason": _DEAD_REASON,
        "letters": "number of records that died of it",
        "error": "last line of the error of the newest one",
    },
    "letters": {
        "letter": "role, topic, partition and offset of the record",
        "role": "role that gave up",
        "reason": _DEAD_REASON,
        "error": "last line of the error",
        "when": "when it was given up",
    },
    "counts": {
        "admitted": "all that the feeder gave out; the other columns add up to it",
        "trained": "in a batch that is trained into a version in force",
        "pending": "not decided yet, or in a batch that is not trained yet",
        "filtered": "scored, and left out: mostly groups whose rewards are all the same",
        "expired": "given up: too late, or too stale",
        "dead": "too few siblings could be scored",
    },
    "questions": {
        "question": "kind, group and siblings",
        "why": "why it was asked",
        "votes": "people who have answered",
        "needed": "people whose answers decide it",
        "judged": "the result",
        "agreement": "share of the votes that say the same",
        "held until": "until then its group waits for the answer",
        "asked": "when it was asked",
        "expires": "an answer after that changes nothing",
        "you": "whether you have answered it",
    },
    "annotators": {
        "annotator": "keyed hash of the name, as it stands on the log",
        "votes": "number of answers that count",
        "median time": "from seeing the question to the answer",
        "cannot judge": "share of pairs that were passed on",
        "left": "share of pairs with the left one chosen; far from one half, the side matters",
        "gold": "share of right answers to questions whose answer is known",
    },
    "agreement": {
        "annotator": "one against the others, or all of them",
        "kind": "kind of the questions",
        "questions": "number of questions that two or more have answered",
        "agree": "share of equal answers",
        "alpha": "Krippendorff's alpha: 1 is agreement, 0 what chance gives",
    },
    "requests": {
        "request": "id of the request",
        "kind": "what was asked for",
        "by": "who asked",
        "expires": "what is not done by then is not done at all",
    },
    "runs": {
        "run": "name of the run folder",
        "state": "what the run does now",
        "version": "version in force: the number of trained batches",
        "reward": "mean of the newest tenth of the steps",
        "rollouts": "number of admitted rollouts",
        "letters": "number of records that could not be processed",
        "wrong": "what keeps it from learning or from going on",
    },
}
"""Table -> head -> what it means."""
