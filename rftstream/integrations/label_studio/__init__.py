"""The bridge to Label Studio: questions become tasks there, and annotations come back as votes, each exactly once.

The bridge keeps no state of its own. In each round it compares the log with Label Studio, and writes the difference:

- *Question -> task.* A task carries the id of its question. A question without a task gets one. Before anything is
  made, all tasks are listed, so a bridge that was killed after it had sent tasks finds them. Where a slow server made a
  task twice, all but the first are closed, and what people say on any of them is an answer to the one question.
- *Annotation -> vote.* What stands of a person on a question is their newest annotation that was not skipped. Where the
  newest vote of that person on the log says something else, the next revision is written: an edit is a revision, a
  deletion a retract. Where it says the same, nothing is. So it does not matter at which point a bridge is killed: the
  next round finds the same difference, or none.
- *No two bridges.* A bridge starts its producer before it reads anything. A later bridge's start fences it, so a commit
  that succeeds has read Label Studio later than everything that another bridge has committed. No old state can be
  written over a newer one.
- *Nothing is lost by looking too early.* A vote is taken back only if its task was listed, whole, without the
  annotation. A task or a project that is gone takes nothing back. The bridge never deletes anything in Label Studio: a
  question that is over is marked in its task, which leaves the queue of the annotators.

    client        HTTP with time limits, tokens that expire, errors that say what to do
    label_config  what annotators see, and what their annotations say
    projects      projects and tasks of a run, found again by what they carry
    mirror        a copy of the tasks, so that most rounds read only changed ones
    bridged_run   the run: questions, votes that stand, texts to show, new votes in transactions
    bridge        one round
    serving       rounds until somebody ends them
"""
