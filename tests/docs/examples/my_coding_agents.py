"""Coding agents as they come, each a command in a folder of its own. They need `claude`, `codex` and `node` on PATH."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from pathlib import Path


async def claude_code(problem, base_url, api_key, seed):
    command = ["claude", "-p", ask(problem), "--model", "policy", "--allowedTools", "Bash,Read,Edit,Write"]
    told = {"ANTHROPIC_BASE_URL": base_url, "ANTHROPIC_AUTH_TOKEN": api_key}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return graded(problem, await said_by(command, {**told, **quiet}))


async def codex(problem, base_url, api_key, seed):
    provider = {"name": "rftstream", "base_url": base_url, "env_key": "RFT_KEY", "wire_api": "responses"}
    inline = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    settings = ["-c", "model_provider=rftstream", "-c", f"model_providers.rftstream={{{inline}}}", "-m", "policy"]
    # The folder is the agent's sandbox here. On a machine that matters, take `-s workspace-write`.
    command = ["codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access", *settings, ask(problem)]
    return graded(problem, await said_by(command, {"RFT_KEY": api_key}))


async def ai_sdk(problem, base_url, api_key, seed, options):
    script = Path(__file__).with_name("my_ai_sdk.mjs")
    command = ["node", str(script), options.get("api", "responses"), ask(problem)]
    return graded(problem, await said_by(command, {"RFT_BASE_URL": base_url, "RFT_KEY": api_key}))


def ask(problem):
    return f"What is {problem['messages'][-1]['content']} Work it out with a tool, and answer with the number alone."


def graded(problem, text):
    return {"reward": float(text.strip() == problem["answer"]), "metrics": {"characters": len(text)}}


async def said_by(command, variables):
    """Run a command in a new folder, which is its home, too; return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": folder, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        try:
            out, error = await process.communicate()
        finally:  # also when the rollout is over before its agent
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise RuntimeError((error or out).decode(errors="replace")[-1000:])
        return out.decode()
