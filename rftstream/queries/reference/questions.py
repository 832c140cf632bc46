"""Questions that users ask of `rftstream explain` in plain words, and the commands that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftstream.queries.reference.search import word_pattern
from rftstream.queries.reference.themes import theme_named

FIRST_WORDS = {"why", "which", "what", "how", "where", "when", "who", "can", "does", "did", "do", "is", "are", "was"}
"""Words with which a question begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainQuestion:
    """A question about a run. `answer` finds it by its words."""

    example: str
    words: tuple[str, ...]
    """Alternatives, separated by spaces. A text asks this if it has one of each, in any form."""
    answer: str

    def is_asked(self, text: str) -> bool:
        """Return whether a text asks this."""
        return all(any(word_pattern(word)(text) for word in alternatives.split()) for alternatives in self.words)


QUESTIONS = (
    PlainQuestion(
        example="why was a group dropped",
        words=(
            "group rollout batch sample answer",
            "drop dropped filter filtered expire expired reject rejected discard discarded throw thrown skip lost",
        ),
        answer="`rftstream audit RUN` counts what became of groups and rollouts, and why; `rftstream trace RUN GROUP` "
        "says it of one; `rftstream studio RUN` lists them",
    ),
    PlainQuestion(
        example="wrong reference answers",
        words=("wrong false incorrect doubtful mislabelled", "reference label gold answer data"),
        answer="`rftstream problems doubtful RUN` lists problems that no attempt solved, where most gave one "
        "other answer; `rftstream rescore RUN --new-answers --into NEWRUN` scores by mended ones",
    ),
    PlainQuestion(
        example="hardest problems",
        words=(
            "problem prompt question task",
            "hard harder hardest easy easier easiest solve unsolved worst best learned unlearned forgotten",
        ),
        answer="`rftstream studio RUN`, page Problems: by reward, or by its change; in Python "
        '`rftstream.open("RUN").problems(order="hardest")`',
    ),
    PlainQuestion(
        example="which rollouts were trained on",
        words=("group rollout answer completion", "train trained"),
        answer="`rftstream trace RUN batch:17` shows those of a batch, `rftstream trace RUN v12` the batch of a "
        "version; `rftstream export RUN FOLDER --fate trained` writes all",
    ),
    PlainQuestion(
        example="which version sampled a rollout",
        words=("rollout answer completion group", "version weights checkpoint"),
        answer="`rftstream trace RUN ROLLOUT` shows the versions that sampled it, its verdict, batch and step",
    ),
    PlainQuestion(
        example="answers that mention a word",
        words=("answer completion output rollout", "mention contain search grep find"),
        answer="`rftstream studio RUN`, page Rollouts, finds texts; `rftstream export RUN FOLDER --text TEXT` writes "
        "those rollouts",
    ),
    PlainQuestion(
        example="longest answers",
        words=("answer completion output rollout", "worst best longest shortest truncated cut"),
        answer="`rftstream studio RUN`, page Rollouts: by reward, tokens or how they ended; in Python "
        '`rftstream.open("RUN").rollouts(order="worst")`',
    ),
    PlainQuestion(
        example="where do I see the completions",
        words=("answer completion output rollout prompt sample", "see show read look print view"),
        answer="`rftstream studio RUN` shows them; `rftstream inspect RUN verified --last 3` prints the newest, with "
        "rewards; before a run, `rftstream try FILE` samples some",
    ),
    PlainQuestion(
        example="how do I use the trained model",
        words=("use export serve deploy upload push merge download get where", "model checkpoint adapter"),
        answer="`rftstream weights export RUN` makes a Hugging Face folder of a version; RUN/final is that of the last "
        "version; `rftstream status RUN` names the best one",
    ),
    PlainQuestion(
        example="which version is the best",
        words=("best", "version checkpoint model step"),
        answer="`rftstream status RUN` names the best version by each evaluation, and how to export it; "
        "`rftstream evaluate RUN --versions all` evaluates those that are held",
    ),
    PlainQuestion(
        example="how do I evaluate a checkpoint",
        words=("evaluate evaluation benchmark", "version checkpoint model"),
        answer="`rftstream evaluate RUN --versions 0,100` does it by the run file's evaluations, `rftstream evaluate "
        "--model FOLDER --benchmark gsm8k` by a benchmark",
    ),
    PlainQuestion(
        example="how do two runs differ",
        words=("compare comparison differ difference", "run version checkpoint model"),
        answer="`rftstream studio RUN RUN`, page Compare: curves and settings of runs; `rftstream evaluate RUN "
        "--versions 0,100`: versions beside each other",
    ),
    PlainQuestion(
        example="was anything lost",
        words=("anything something nothing", "lose lost miss missing"),
        answer="`rftstream audit RUN` counts from the log what became of every rollout, and exits with 1 if one is "
        "missing or there twice",
    ),
    PlainQuestion(
        example="what happened overnight",
        words=("happen happened overnight",),
        answer="`rftstream status RUN` says where it stands, and what was changed and restarted; `rftstream logs RUN "
        "--troubles` shows warnings and errors, `rftstream logs RUN --role run` pauses, too",
    ),
    PlainQuestion(
        example="how long will it take",
        words=("long time eta remaining", "take left eta remaining until last"),
        answer="`rftstream check FILE` estimates it before a run; `rftstream status RUN` says how far a run is",
    ),
    PlainQuestion(
        example="is it stuck",
        words=("stuck hang hung frozen stall",),
        answer="`rftstream status RUN` says what stands still, and why; `rftstream logs RUN --troubles` shows warnings "
        "and errors",
    ),
    PlainQuestion(
        example="where is the traceback of an error",
        words=("error traceback exception log", "where see read find show"),
        answer="`rftstream logs RUN --troubles` shows warnings and errors of all processes, `rftstream dead list RUN` "
        "those of rewards and environments",
    ),
    PlainQuestion(
        example="why was my run stopped",
        words=("why", "stop end fail die crash exit", "run training trainer"),
        answer="`rftstream status RUN` says what stopped it, `rftstream logs RUN --troubles` what was said before",
    ),
    PlainQuestion(
        example="how do I delete a run",
        words=("delete remove clean", "run"),
        answer="`rftstream delete RUN` shows what would be removed, and asks",
    ),
    PlainQuestion(
        example="how do I cancel a run",
        words=("cancel abort stop end kill", "run training"),
        answer="ctrl-C stops it, and `rftstream resume RUN` goes on; `rftstream drain RUN` ends it in order; "
        "`rftstream pause RUN` holds it; run.steps, run.hours and run.stop_reward say when it ends by itself",
    ),
    PlainQuestion(
        example="how do I score the rollouts again",
        words=("reward score verdict", "again anew another change"),
        answer="`rftstream rescore RUN --reward NAME --into NEWRUN` scores recorded rollouts with another reward; a "
        "`rftstream resume RUN` with another one scores what comes",
    ),
)


def answer(text: str) -> str | None:
    """Return the commands that answer a question in plain words; None if it is none of these."""
    spaced = text.replace("_", " ")
    return next((f"{text}: {one.answer}" for one in QUESTIONS if one.is_asked(spaced)), None)


def whole(keys: Sequence[str]) -> tuple[str, ...]:
    """Return a question or a theme that was typed without quotes, a key for each word, as one key. Other keys stay."""
    text = " ".join(keys)
    is_question = len(keys) > 1 and (keys[0].lower() in FIRST_WORDS or answer(text) or theme_named(text))
    return (text,) if is_question and "." not in text else tuple(keys)
