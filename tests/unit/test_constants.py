"""Constants that bound something, and where each is reached. A new one needs a row; settings have theirs in
tests/e2e/test_bounds.py. Rooms that only show a run to people, or try a run file, bound what they show and end nothing:
theirs are no part of this."""

from __future__ import annotations

import ast
from pathlib import Path

import rftstream
from rftstream.contracts.codec import headers_of
from rftstream.contracts.dead import MAX_ERROR, DeadLetter
from rftstream.roles.feeder.cursor import MAX_REASONS, OTHER, OperatorCounts

ROOT = Path(rftstream.__file__).parent
SHOWN = ("queries", "studio", "preflight", "testing", "commands", "config")

HERE = "tests/unit/test_constants.py"
REACHED: dict[str, str] = {
    "contracts/arrays.py MAX_RANK": "tests/contracts/test_contract_damage.py",
    "contracts/checks.py MAX_DEPTH": "tests/contracts/test_contract_damage.py",
    "contracts/dead.py MAX_ERROR": HERE,
    "contracts/codec.py _LONGEST_HEADERS _LONGEST_RUN": "tests/contracts/test_contract_limits.py",
    "contracts/rollouts.py MAX_ROLE_CHARACTERS": "tests/unit/gateway/test_dialects.py",
    "contracts/tasks.py _MAX_SEED": "tests/contracts/test_contract_damage.py",
    "contracts/topics.py MAX_DEAD_BYTES": "tests/contracts/test_contract_limits.py",
    "contracts/topics.py MAX_RECORD_BYTES": "tests/contracts/test_contract_limits.py",
    "roles/explorer/agents/launcher.py MAX_NUMBERS": "tests/unit/environments/hosts/test_launched.py",
    "roles/explorer/agents/launcher.py MAX_STARTS": "tests/unit/environments/hosts/test_launched.py",
    "roles/explorer/concurrency.py MOST MOST_SAMPLES LONGEST_PATIENCE_S": "tests/unit/roles/test_concurrency.py",
    "roles/explorer/fit_to_record.py MAX_BODY_BYTES": "tests/flow/test_explorer.py",
    "roles/explorer/saved/partials.py MAX_HELD_BYTES": "tests/unit/roles/test_partials_view.py",
    "roles/feeder/cursor.py MAX_REASONS": HERE,
    "roles/verifier/groups.py MAX_GAP_S": "tests/flow/test_compared_siblings.py",
    "runs/notes.py MAX_TEXT MAX_TAGS MAX_BYTES": "tests/unit/studio/test_notes.py",
    "roles/feeder/step.py MAX_TASKS_A_TRANSACTION": "tests/e2e/test_bounds.py",
    "service/records/control_in_force.py MAX_SUMMARY_BYTES": "tests/unit/service/test_control_summaries.py",
    "service/records/outcomes_in_force.py MAX_ITEMS": "tests/unit/service/test_summaries.py",
    "service/records/versions_in_force.py MAX_ITEMS": "tests/unit/service/test_summaries.py",
    "service/records/versions_in_force.py MAX_RUNS": "tests/unit/service/test_summaries.py",
    "service/dead_letters.py MAX_LETTER_BYTES": "tests/flow/test_explorer.py",
    "weights/follower.py MAX_GONE": "tests/unit/weights/test_follower.py",
    "transport/base.py MAX_METADATA_BYTES": "rftstream/testing/conformance_tests/transactions.py",
    "transport/kafka/feed.py MAX_HELD_BYTES": "tests/broker/test_kafka_own.py",
    "data/tasksets/columns.py MAX_DEPTH MAX_PROBLEM_BYTES": "tests/unit/data/test_tasksets_tables.py",
    "data/harbor_tasks.py MAX_BYTES": "tests/unit/data/test_harbor_tasks.py",
    "environments/harbor/agent.py MAX_REWARD_BYTES": "tests/engines/test_docker_places.py",
    "environments/places/kubernetes.py MAX_WORD": "tests/unit/environments/places/test_kubernetes.py",
    "environments/places/relay.py MAX_CONNECTIONS MAX_WAITING": "tests/unit/environments/places/test_relay.py",
    "environments/called.py MAX_ANSWER_BYTES": "tests/unit/environments/test_called.py",
    "environments/hosts/pool.py MAX_TASKS_BYTES": "tests/unit/environments/hosts/test_named.py",
    "environments/hosts/adapters/gymnasium.py MOST_NAMED": "tests/unit/environments/hosts/test_gymnasium.py",
    "environments/hosts/host.py MAX_FRAME_BYTES": "tests/unit/environments/hosts/test_hosted.py",
    "environments/tools.py MAX_HANGING": "tests/unit/environments/test_tools.py",
    "environments/toolset/calculator.py MAX_CHARACTERS MAX_DIGITS MAX_NESTING MAX_FACTORIAL":
        "tests/unit/environments/test_calculator.py",
    "environments/toolset/search.py MAX_QUERY_CHARACTERS": "tests/unit/environments/test_search.py",
    "gateway/dialects/__init__.py MAX_KEY_CHARACTERS": "tests/unit/gateway/test_dialects.py",
    "gateway/dialects/fields.py MAX_STOPS MAX_DEPTH": "tests/unit/gateway/test_dialects.py",
    "http/client.py MAX_ANSWER_BYTES": "tests/unit/policies/test_openai.py",
    "http/server.py MAX_HEAD_BYTES": "tests/unit/http/test_server.py",
    "gateway/keys.py MAX_KNOWN": "tests/unit/gateway/test_keys.py",
    "launch/supervisor.py MAX_CRASHES": "tests/unit/launch/test_supervisor.py",
    "metrics.py MAX_NAME_CHARACTERS MAX_NAMES_OF_ROLLOUT": "tests/unit/roles/test_names.py",
    "metrics.py MAX_NAMES_OF_RECORD": "tests/unit/roles/test_tally.py",
    "metrics.py MAX_NAMES": "tests/unit/test_metrics.py",
    "models/vision/images.py MAX_IMAGE_BYTES MAX_PIXELS": "tests/unit/weights/test_media.py",
    "policies/hf/packed.py MAX_HOLES": "tests/unit/policies/test_packed.py",
    "policies/hf/row.py MAX_THREADS": "tests/unit/policies/test_row.py",
    "rewards/answers/rectangles.py MAX_BOXES": "tests/unit/rewards/test_vision.py",
    "trackers/served.py MAX_WAITING": "tests/unit/trackers/test_served.py",
    "integrations/foreign_configs/__init__.py MOST_GPUS": "tests/unit/integrations/test_foreign_configs.py",
    "weights/stores/anchors.py MOST_DELTAS": "tests/unit/weights/test_deltas.py",
}  # fmt: skip
"""File and its constants -> the file whose tests reach them."""

NOT_REACHED: dict[str, str] = {
    "integrations/foreign_configs/shell.py MOST_LINES": "a quote that stays open longer: its line is left out",
    "contracts/codec.py _MAX_ACCEPTED": "a cache, which takes no more then",
    "roles/explorer/agents/loop.py MAX_REMEMBERED": "forgets the oldest of 100,000 ended rollouts",
    "roles/feeder/step.py MAX_DRAWS_A_TRANSACTION": "only says where a transaction ends",
    "runs/observer.py MOST_AVERAGED": "the first and last rewards that are shown are means of at most as many steps",
    "roles/evaluator/due.py LONGEST_RETRY_S": "a pause",
    "roles/synthesiser/models.py LONGEST_PAUSE_S": "a pause",
    "roles/trainer/retention/trimmed_deletions.py LONGEST_PAUSE_S": "a pause",
    "roles/verifier/groups.py MAX_EARLIER": "forgets the oldest of 10,000 groups; their late siblings wait once more",
    "transport/embedded/lock.py _LONGEST_STEP_S": "a pause",
    "transport/embedded/member.py _LONGEST_TURN_S": "a pause",
    "roles/feeder/cursor.py MOST": "no bound: a number with which the size of a cursor is tried",
    "roles/trainer/assembly.py MAX_CHOICES": "twelve forged twins in one batch; the batch is then incomplete",
    "service/reading.py MAX_RECORDS": "only says how many come at once",
    "service/loops/results.py MAX_TRANSACTION_BYTES": "only says where a transaction ends",
    "service/loops/results.py MAX_TRANSACTION_RECORDS": "only says where a transaction ends",
    "service/role_claim.py MAX_OVERTAKEN": "gives the role up to the one that is replaced",
    "service/role_claim.py MAX_WAIT_S": "a pause",
    "service/service.py MAX_BACKOFF_S": "a pause",
    "service/service.py MAX_IDLE_S": "a pause",
    "service/records/summaries.py MAX_RECORDS_A_LOOK": "only says how many are read back at once",
    "transport/kafka/connection.py MAX_SAID": "cuts a text",
    "transport/kafka/producer.py MAX_UNSENT_BYTES": "a transaction above it is sent in parts",
    "core/ratios.py MAX_LOG_RATIO": "a part of the formulas; tests/unit/core has their numbers",
    "data/feedback/rows.py MAX_TEXT": "a longer comment is refused by its row",
    "data/operators/answers.py MAX_GROUP_SIZE": "cuts a wish",
    "data/operators/counts.py MAX_REASONS MAX_FAILURES": "the rest is counted together",
    "data/operators/pipeline.py MAX_REASON _MAX_COMPLAINTS": "cuts a text, and a number of lines in the log",
    "data/tasksets/images.py MAX_IMAGES": "a problem with more is refused by its row",
    "environments/called.py MAX_PAUSE_S": "a pause",
    "environments/hosts/adapters/openenv.py MAX_BYTES": "16 MB of an answer; the host's frame is the bound",
    "environments/hosts/runner.py MAX_LINE": "cuts a text",
    "environments/served.py MAX_ANSWER_BYTES": "16 MB of an answer; read as that of a called agent",
    "environments/toolset/arguments.py MAX_SHOWN": "cuts a text",
    "environments/toolset/mcp.py MAX_PAGES": "a server that lists tools without end is refused",
    "error_kinds.py MAX_KINDS": "a cache, which forgets all then",
    "gateway/dialects/fields.py MAX_ASKED_BYTES": "cuts what is recorded of a request",
    "gateway/dialects/settings.py MAX_RECORDED": "cuts what is recorded of a request",
    "http/server.py MAX_REFUSED_BYTES MAX_WAITING": "closes a connection that sends 64 MB in vain; a backlog",
    "gateway/keys.py _MAX_KEY": "a longer key is none of ours",
    "gateway/server.py MAX_PARTS": "names are cut at every door: tests/unit/roles/test_names.py",
    "launch/health.py MAX_CONNECTIONS": "clients at once",
    "launch/host.py LONGEST_WAIT_S": "pauses",
    "launch/joining.py _LONGEST_LOOK_S": "pauses",
    "integrations/label_studio/bridge.py MAX_NEW_TASKS": "only says how many are sent in a round",
    "integrations/label_studio/bridged_run.py MAX_ORIGINAL": "cuts a text",
    "integrations/label_studio/label_config.py MAX_BUTTONS": "a finer scale has a field",
    "integrations/label_studio/projects.py MAX_SENT_TASKS MAX_SENT_CHARACTERS": "only say where a request ends",
    "integrations/label_studio/serving.py MAX_PAUSE_S": "a pause",
    "environments/places/kubernetes.py MAX_ANSWER": "64 MB of what a cluster says of pods",
    "launch/supervisor.py LONGEST_PAUSE_S": "a pause",
    "integrations/traces.py MAX_ANSWER_BYTES": "a collector's answer is not needed",
    "launch/zygote.py MAX_DEATHS": "workers are started without it then",
    "metrics.py MAX_CONCURRENT MAX_STALENESS": "no bound: a metric",
    "models/calls/call_reading.py MAX_ID_CHARACTERS": "a longer id is given anew",
    "models/rendering.py MAX_KEPT_CHARACTERS": "a cache takes no longer prompts",
    "models/folders/tiny_copy.py MAX_LAYERS AT_MOST": "the shape of a copy",
    "policies/hf/images.py MAX_FEATURES MAX_MEDIA": "caches",
    "policies/openai/routing.py MAX_PLACED LONGEST_PAUSE_S LONGEST_AFTER_S": "a cache, and pauses",
    "policies/hf/row.py MAX_BATCH": "further rows are decoded by PyTorch",
    "policies/openai/images.py MAX_IMAGES": "a cache",
    "policies/vllm/images.py MAX_IMAGES": "a cache",
    "rewards/anls.py MAX_GOLD_CHARS": "how long an answer is read",
    "rewards/answers/boxes.py MAX_MARKS MAX_MARKED MAX_JOINED MAX_WHOLE": "how much of an answer is read",
    "rewards/answers/compare.py MAX_MATCHED": "longer lists are compared in order",
    "rewards/answers/maths/compounds.py _MAX_CHARS": "how long an answer is read",
    "rewards/answers/maths/expressions.py _MAX_DEPTH": "how deep an answer is read",
    "rewards/answers/maths/guards.py "
    "MAX_CHARS MAX_DEPTH MAX_EXACT_BITS MAX_LOG2 MAX_EXACT_FACTORIAL MAX_FACTORIAL MAX_TERMS":
        "what is not computed is compared as it stands",
    "rewards/answers/json_values.py MAX_TRIES": "how much of an answer is read",
    "rewards/answers/reading.py MAX_ITEMS _MAX_DEPTH": "how much of an answer is read",
    "rewards/answers/rectangles.py MAX_TEXT MAX_NUMBER": "how much of an answer is read",
    "rewards/answers/thoughts.py _MAX_JSON": "how much of an answer is read",
    "rewards/answers/maths/tokens.py MAX_TOKENS": "how much of an answer is read",
    "rewards/answers/verdicts.py MAX_SHORT": "how long a sentence is read",
    "rewards/chart_answer.py MAX_CHARS": "how long an answer is read",
    "rewards/child.py MAX_DETAIL": "cuts a text",
    "rewards/code_tests.py MAX_UNPACKED_BYTES": "256 MB of tests of one problem are refused",
    "rewards/evaluating.py MAX_MEMORY_BYTES": "an answer that takes more is wrong, as in the sandbox",
    "rewards/frames.py MAX_FRAME_BYTES": "256 MB of rollouts of one problem",
    "rewards/functions.py MAX_NUMBERS": "names are cut at every door: tests/unit/roles/test_names.py",
    "rewards/judge.py MAX_REPEATED": "cuts a text",
    "rewards/judge.py MAX_SAID": "cuts a text",
    "rewards/math.py MAX_PLAIN_GOLD MAX_VERDICT MAX_SECOND_CHARS": "how an answer of that length is read",
    "rewards/object_count.py MAX_CHARS": "how long an answer is read",
    "rewards/process.py MAX_HELD MAX_CHUNK_BYTES": "only say how much is sent at once",
    "rewards/scorer.py MAX_BAD_STARTS": "tests/unit/rewards/test_scorer.py has starts that fail",
    "rewards/functions.py MAX_DETAIL": "cuts a text",
    "rewards/served.py MAX_SHOWN": "cuts a text",
    "runs/writes/additions.py MAX_RECORDS MAX_BYTES": "only say where a transaction ends",
    "sandbox/inside/confine.py MAX_DESCRIPTORS": "a program's own bound",
    "sandbox/inside/plain.py MAX_DEPTH MAX_INT_BITS MAX_SAME_HASH": "a program's value beyond is none",
    "sandbox/compare.py MAX_SHOWN": "cuts a text",
    "sandbox/inside/programs.py MAX_TEXT MAX_LINE": "cuts a text",
    "sandbox/inside/wire.py MAX_HEAD_BYTES MAX_BODY_BYTES MAX_DESCRIPTORS": "what one request holds, of 256 MB",
    "sandbox/local.py MAX_FILES": "a program's own bound",
    "sandbox/run.py MAX_DETAIL": "cuts a text",
    "sandbox/server.py MAX_REQUEST_BYTES MAX_GET_BYTES MAX_CONNECTIONS": "256 MB of a request; clients at once",
    "trackers/mlflow.py MAX_METRICS MAX_PARAMS MAX_VALUE": "where a request ends, by the service's own bounds",
    "trackers/served.py LONGEST_PAUSE_S": "a pause",
    "weights/deltas/delta.py MAX_LANE_ELEMENTS": "2^31 elements of one stream",
    "weights/stores/media.py MAX_KNOWN": "a cache",
    "weights/snapshot.py MAX_HEADER_BYTES": "100 MB of names, as in the safetensors library",
    "weights/state.py MAX_THREADS": "no more threads",
    "weights/stores/store_remote.py LONGEST_PAUSE_S MAX_PARTS": "a pause; the size of parts grows with the object",
}  # fmt: skip
"""File and its constants -> what happens there, and so why no test goes that far."""


WORDS = {"MAX", "MOST", "LONGEST"}


def test_every_bound_has_a_row() -> None:
    found = set()
    for file in ROOT.rglob("*.py"):
        name = str(file.relative_to(ROOT))
        if name.split("/")[0] in SHOWN:
            continue
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            found |= {f"{name} {one}" for one in names if WORDS & set(one.split("_"))}
    known = [f"{file} {name}" for row in (*REACHED, *NOT_REACHED) for file, *names in [row.split()] for name in names]
    assert len(set(known)) == len(known)
    wrong = sorted(found ^ set(known))
    assert not wrong, f"tests/unit/test_constants.py: add or remove rows of REACHED or NOT_REACHED for these: {wrong}"
    assert not [place for place in REACHED.values() if not (ROOT.parent / place).exists()]


def test_reasons_beyond_the_most_are_counted_together() -> None:
    counts = OperatorCounts()
    for number in range(MAX_REASONS + 2):
        counts.skip("sums", "operator", f"reason {number}")
    reasons = {reason: count for (_, _, reason), count in counts.skipped.items()}
    assert (len(reasons), reasons[OTHER], sum(reasons.values())) == (MAX_REASONS + 1, 2, MAX_REASONS + 2)


def test_the_header_of_a_dead_letter_is_cut() -> None:
    letter = DeadLetter(
        topic="tasks", partition=0, offset=1, key=b"", value=b"", headers=(), role="explorer", reason="x",
        detail="e" * (MAX_ERROR + 1), tries=1,
    )  # fmt: skip
    assert dict(headers_of(letter, "run"))["error"] == b"e" * MAX_ERROR
