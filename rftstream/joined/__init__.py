"""Own samplers, training loops and scorers on a run's log: `rftstream.join(RUN, role=...)`.

A joined loop is no second implementation of a role. The role runs as in `rftstream worker`, in a thread of the user's
process: the same claims, transactions, heartbeats, retention, metrics and `/health`. Only its engine is another one: a
policy, backend or scorer (`joined` in the tables) that lays each request on a desk (`rftstream/desk.py`) and waits for
the answer. The user's loop works in the user's thread and takes work from the desk. So everything that the log promises
holds for a joined loop as it does for our own roles, and a simulation can play the loop.

    role's thread                                      user's thread
    service -> step -> engine `joined` --- desk ---->  for task in me.tasks():
            <-         <-               <----------        me.finish(task, tokens=..., logprobs=..., version=...)

What the loop hands in is checked in the user's thread, before the role sees it. An error of the role is raised in the
loop at its next call. An error of the loop ends the `with` block: the role gives back what is not answered, and leaves.

    worker     the role's thread, and what all joined loops share
    tasks      what samplers and scorers share
    explorer   tasks to sample
    trainer    batches to train on
    verifier   rollouts to score
    join       the door: which run, which role
"""
