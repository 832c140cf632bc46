"""A taskset of verifiers, as it comes. It runs in an interpreter that has `verifiers`."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 3)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for number in range(8):
            yield SumTask(SumData(prompt=f"{number}+5=", answer=str(number + 5)), self.config.task)


__all__ = ["SumTaskset"]
