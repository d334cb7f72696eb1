"""config.json: what is read from it, as transformers reads it, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from decodestep.accel.config import ModelConfig, RopeConfig
from decodestep.accel.errors import ModelError

ROPE = ("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes config.json, and generation_config.json if given, and returns their folder."""

    def write(generation: object = None, **values: object) -> Path:
        config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **values}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(folder)
    assert caught.value.source == str(folder)
    return caught.value.problems


def assert_same_as_transformers(folder: Path) -> None:
    ours, theirs = ModelConfig.from_folder(folder), Qwen3Config.from_pretrained(folder)
    for name in ModelConfig.__slots__:
        if name not in {"rope", "dtype", "eos_token_ids"}:
            assert getattr(ours, name) == getattr(theirs, name), name
    theirs.standardize_rope_params()  # as its rotary embedding does before it reads them
    rope = theirs.rope_parameters
    assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    if ours.rope.kind != "default":
        for name in ROPE:
            assert getattr(ours.rope, name) == rope.get(name), name
        assert ours.rope.beta_fast == (rope.get("beta_fast") or 32)
        assert ours.rope.beta_slow == (rope.get("beta_slow") or 1)
        assert ours.rope.truncate == rope.get("truncate", True)


@pytest.mark.parametrize("name", CONFIGS)
def test_reads_what_transformers_reads(name: str, checkpoint_of: Callable[[str], Path]) -> None:
    assert_same_as_transformers(checkpoint_of(name))


def test_absent_fields_have_the_defaults_of_transformers(folder: Folder) -> None:
    assert_same_as_transformers(folder())


@pytest.mark.parametrize(
    "values",
    [
        {"num_key_value_heads": None},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {
            "rope_scaling": {"type": "linear", "factor": 3.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
        },
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 3.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
        {"rope_scaling": YARN, "original_max_position_embeddings": 128},
        {"rope_scaling": YARN | {"beta_fast": None, "beta_slow": 0, "attention_factor": None}},
    ],
    ids=json.dumps,
)
def test_spellings_are_resolved_as_by_transformers(values: dict[str, Any], folder: Folder) -> None:
    assert_same_as_transformers(folder(**values))


def test_yarn_factor_null_is_the_ratio_of_the_contexts(folder: Folder) -> None:
    config = ModelConfig.from_folder(
        folder(max_position_embeddings=256, rope_parameters=YARN | {"factor": None})
    )
    assert config.rope == RopeConfig("yarn", 10000.0, 4.0, 64)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (None, None, ()),
        (3, None, (3,)),
        (3, {}, (3,)),
        (3, {"eos_token_id": None}, (3,)),
        (3, {"eos_token_id": 5}, (5,)),
        ([3, 4], {"eos_token_id": [7, 5, 7]}, (7, 5)),
        (0, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_tokens_are_those_of_generation_config_else_of_config(
    config_eos: object, generation: object, expected: tuple[int, ...], folder: Folder
) -> None:
    assert ModelConfig.from_folder(folder(generation, eos_token_id=config_eos)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
    ],
)
def test_dtype_in_both_spellings(values: dict[str, str], expected: str, folder: Folder) -> None:
    assert ModelConfig.from_folder(folder(**values)).dtype == expected


@pytest.mark.parametrize(
    "values",
    [
        {"use_sliding_window": False, "sliding_window": 128},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 4096, "max_position_embeddings": 4096},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 32},
        {"layer_types": ["full_attention"] * 32},
        {"quantization_config": None, "num_experts": 0, "partial_rotary_factor": 1.0},
        {"architectures": None},
    ],
    ids=json.dumps,
)
def test_accepts_what_changes_nothing(values: dict[str, Any], folder: Folder) -> None:
    ModelConfig.from_folder(folder(**values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "llama"}, 'model_type "llama": expected "qwen3"'),
        ({"architectures": ["Qwen3Model"]}, 'architectures ["Qwen3Model"]: expected ["Qwen3ForCausalLM"]'),
        ({"num_experts": 8}, "num_experts 8: expected none: mixtures of experts are not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu": expected "silu"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: expected 1"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor 0.5: expected 1",
        ),
        ({"head_dim": 17}, "head_dim 17: expected an even number"),
        ({"head_dim": None}, "head_dim null: expected a positive integer"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads 6: expected a multiple of num_key_value_heads 4",
        ),
        ({"num_attention_heads": "6"}, 'num_attention_heads "6": expected a positive integer'),
        ({"vocab_size": 0}, "vocab_size 0: expected a positive integer"),
        ({"hidden_size": 64.0}, "hidden_size 64.0: expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers true: expected a positive integer"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps NaN: expected a number above 0"),
        ({"attention_bias": 1}, "attention_bias 1: expected true or false"),
        ({"dtype": "float64"}, 'dtype "float64": expected "float32" or "bfloat16" or "float16"'),
        (
            {"eos_token_id": [1, "2"]},
            'eos_token_id [1, "2"]: expected a token id, a list of token ids or null',
        ),
        ({"rope_theta": -1.0}, "rope_theta -1.0: expected a number above 1"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            'rope_scaling.type "dynamic": expected "default", "linear" or "yarn"',
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing: expected a number above 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}},
            'rope_parameters.truncate "no": expected true or false',
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            'rope_parameters {"full_attention": {"rope_type": "default"}}: '
            "expected one object of rope parameters for all layers",
        ),
        (
            {"use_sliding_window": True},
            "use_sliding_window true: expected false, or a sliding_window of at least 32768",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            'layer_types ["full_attention", "sliding_attention"]: expected "full_attention" in every layer',
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value),
)
def test_refuses_naming_field_and_value(values: dict[str, Any], expected: str, folder: Folder) -> None:
    assert problems_of(folder(**values)) == [expected]


def test_refuses_quantised_checkpoints_without_printing_all_of_it(folder: Folder) -> None:
    quantization = {"quant_method": "fp8", "modules_to_not_convert": [f"layer{n}" for n in range(1000)]}
    (problem,) = problems_of(folder(quantization_config=quantization))
    assert problem.startswith('quantization_config {"quant_method": "fp8"')
    assert len(problem) < 250


def test_names_all_problems_at_once(folder: Folder) -> None:
    problems = problems_of(
        folder(
            {"eos_token_id": -1},
            model_type="qwen3_moe",
            num_experts=128,
            hidden_size=None,
            rope_scaling={"rope_type": "llama3"},
        )
    )
    assert [problem.split()[0] for problem in problems] == [
        "model_type",
        "num_experts",
        "hidden_size",
        "rope_scaling.rope_type",
        "generation_config.json:",
    ]


def test_says_what_to_do_about_a_config_that_cannot_be_read(tmp_path: Path, folder: Folder) -> None:
    (missing,) = problems_of(tmp_path)
    assert missing.startswith("config.json is not there: expected a folder with config.json")
    (tmp_path / "config.json").write_text("[]")
    assert problems_of(tmp_path) == ["config.json holds no JSON object: repair it, or fetch the file again"]
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff')
    (binary,) = problems_of(tmp_path)
    assert binary.startswith("config.json is not JSON (")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    (unreadable,) = problems_of(tmp_path)
    assert unreadable.startswith("config.json cannot be read (Is a directory)")
    (tmp_path / "config.json").rmdir()
    folder()
    (tmp_path / "generation_config.json").write_text("{")
    (generation,) = problems_of(tmp_path)
    assert generation.startswith("generation_config.json is not JSON (")


FIELDS = [
    *(name for name in ModelConfig.__slots__ if name not in {"rope", "eos_token_ids"}),
    *("model_type", "architectures", "eos_token_id", "torch_dtype", "hidden_act", "partial_rotary_factor"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "quantization_config"),
    *("type", "rope_type", "beta_fast", "beta_slow", "truncate", *ROPE),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["qwen3", "yarn", ""])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(FIELDS), inner), max_leaves=12
)


@given(values=st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_json_is_either_a_sound_config_or_a_model_error(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": None} | values))
    try:
        config = ModelConfig.from_folder(folder)
    except ModelError as error:
        assert error.problems
        assert len(set(error.problems)) == len(error.problems)
    else:
        assert config.num_attention_heads % config.num_key_value_heads == 0
        assert config.head_dim % 2 == 0
        assert config.rope.factor > 0
