"""Harnesses: programs that run an agent in a place.

All get the same variables: INSTRUCTION, MODEL, and the address and key of the model under the names that OpenAI's and
Anthropic's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rftstream.environments.places.base import MODEL_PORT

MODEL = "policy"
"""Name of the model at the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """One harness."""

    install: str = ""
    """Shell commands that put it into a task's image, once, with network."""
    command: str
    """Shell command that runs the agent on $INSTRUCTION."""
    variables: Mapping[str, str] = field(default_factory=dict)


HARNESSES = {
    "mini-swe-agent": Harness(
        install=(
            "python3 -m venv /opt/mini-swe-agent\n"
            "/opt/mini-swe-agent/bin/pip install --no-cache-dir --quiet "
            "'mini-swe-agent>=2,<3' 'litellm[mcp]' orjson fastapi\n"
        ),
        command=(
            '/opt/mini-swe-agent/bin/mini --yolo --model="openai/$MODEL" --task="$INSTRUCTION" --exit-immediately '
            "--output=/logs/agent/trajectory.json"
        ),
        variables={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    "claude-code": Harness(
        install=(
            "command -v npm >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends npm)\n"
            "npm install --global --silent @anthropic-ai/claude-code\n"
        ),
        command='claude -p "$INSTRUCTION" --model "$MODEL" --allowedTools Bash,Read,Edit,Write',
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"},
    ),
    "codex": Harness(
        install=(
            "command -v npm >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends npm)\n"
            "npm install --global --silent @openai/codex\n"
        ),
        command=(
            'codex exec --skip-git-repo-check -s danger-full-access -m "$MODEL" -c model_provider=rftstream -c '
            '"model_providers.rftstream={name=\\"rftstream\\", base_url=\\"$OPENAI_BASE_URL\\", '
            'env_key=\\"OPENAI_API_KEY\\", wire_api=\\"responses\\"}" "$INSTRUCTION"'
        ),
    ),
}
"""Name -> harness."""


def model_variables(instruction: str, api_key: str) -> dict[str, str]:
    """Return the variables of every harness."""
    url = f"http://127.0.0.1:{MODEL_PORT}/v1"
    return {
        "INSTRUCTION": instruction,
        "MODEL": MODEL,
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }
