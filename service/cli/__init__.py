"""The decodestep command. Here is what each command takes; what it does is loaded only when it runs."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env

from decodestep.service.cli.config_file import ConfigFile
from decodestep.service.cli.options import SamplingOptions, TargetOptions
from decodestep.service.options import ModelOptions, OptionError, ServeOptions


def _one_prompt(_type: object, value: str, **_: object) -> list[str]:
    """What a variable holds is one prompt, spaces and all."""
    return [value]


Config = Annotated[Path | None, Parameter(help="YAML file with options, such as `max_rows: 32`.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Report in JSON, one object a line.")]
Prompts = Annotated[
    tuple[str, ...],
    Parameter(
        help="Text to continue; may be given several times. `-` reads one prompt from stdin.",
        allow_leading_hyphen=True,
        env_var_split=_one_prompt,
    ),
]
Chat = Annotated[
    bool, Parameter(help="Put each prompt into the model's chat template, as what the user says.")
]
Model = Annotated[str | None, Parameter(help="A folder, a hub id or demo, to look at.")]
_SERVE, _MODEL, _TARGET, _SAMPLING = ServeOptions(), ModelOptions(), TargetOptions(), SamplingOptions()


def _version() -> str:
    return importlib.metadata.version("decodestep")


app = App(
    name="decodestep",
    version=_version,
    help="Runs prefill and decode steps of one Qwen3 model for external schedulers, over gRPC.",
    help_epilogue="Each option of a command is a flag (--max-rows 32), an environment variable "
    "(DECODESTEP_MAX_ROWS=32) and a key in the YAML file of --config (max_rows: 32); "
    "the first of these that is there counts.",
    help_format="markdown",
    default_parameter=Parameter(negative_iterable=(), show_env_var=False),
    result_action="return_value",
    print_error=False,
    exit_on_error=False,
)
# Variables that are no option are left alone: for a service named decodestep, Kubernetes sets DECODESTEP_PORT
# and DECODESTEP_SERVICE_HOST.
app.config = (Env("DECODESTEP_", command=False), ConfigFile(app))


@app.command
def serve(*, options: ServeOptions = _SERVE, config: Config = None, as_json: Json = False) -> int:
    """Serve one model until SIGTERM or Ctrl-C.

    Writes `listening on ...` and, when the model is loaded, `ready` to stderr; with --json, JSON lines with
    `event` listening, progress, ready, stopping, stopped or error to stdout.

    For example:

        decodestep serve

        decodestep serve --model Qwen/Qwen3-0.6B --listen unix:/run/decodestep.sock --listen 127.0.0.1:50051

        decodestep serve --model /models/qwen3 --kv-cache-memory 4GiB --config decodestep.yaml
    """
    from decodestep.service.cli.serve import serve as run  # noqa: PLC0415

    return run(options, as_json)


@app.command
def generate(
    *,
    prompt: Prompts,
    chat: Chat = False,
    sampling: SamplingOptions = _SAMPLING,
    target: TargetOptions = _TARGET,
    model: ModelOptions = _MODEL,
    config: Config = None,
    as_json: Json = False,
) -> int:
    """Continue prompts, all at once, and print the texts in order.

    With --target a running service does it; otherwise one is started inside this process for as long as it
    takes, with the options under `Model and device` and `KV cache and sequences`.

    For example:

        decodestep generate --prompt "In the beginning" --max-tokens 40

        decodestep generate --prompt - --target unix:/run/decodestep.sock < prompt.txt

        decodestep generate --prompt "The heavens declare" --prompt "Blessed are the" --temperature 0.8 --json
    """
    from decodestep.service.cli.generate import Job  # noqa: PLC0415
    from decodestep.service.cli.generate import generate as run  # noqa: PLC0415

    prompts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in prompt]
    if not all(prompts):
        raise OptionError("prompt", repr(""), "a text that is not empty")
    return run(Job(prompts, chat, sampling, model, target, as_json))


@app.command
def info(
    *,
    target: TargetOptions = _TARGET,
    model: Model = None,
    config: Config = None,
    as_json: Json = False,
) -> int:
    """Say what a running service is and holds, or what a model folder would need.

    Without --target and --model it asks the service on 127.0.0.1:50051. With --model it looks at the folder
    without loading weights, and exits with 1 if the service would refuse it. --target goes before --model.

    For example:

        decodestep info

        decodestep info --target unix:/run/decodestep.sock --json

        decodestep info --model /models/qwen3
    """
    if model is not None and target.target is None:
        from decodestep.service.cli.folder import info_of_model  # noqa: PLC0415

        return info_of_model(model, as_json)
    from decodestep.service.cli.info import info_of_service  # noqa: PLC0415

    return info_of_service(target, as_json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""
    try:
        code: int | None = app(arguments)
        sys.stdout.flush()
    except (CycloptsError, OptionError) as error:
        print(
            f"error: {error}\n`decodestep --help` and `decodestep COMMAND --help` tell more", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0
