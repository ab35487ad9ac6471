"""Damaged, foreign and edited files are refused; a file is written in one step."""

import copy
import dataclasses
import io
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import asap_jax as aj
from asap_jax.artifact import archive, replacing
from asap_jax.predictor.row_mass import RowMass

SPEC = aj.SinkhornSpec(num_steps=4)
PATH = "layer/SinkhornAttention_0"
WIDTH = 4  # of a head


def some(*shape):
    """Numbers of no meaning."""
    return problems.normal(np.random.default_rng(shape), *shape)


PREDICTOR = aj.Predictor(
    features=(aj.SlicedPotentials(some(3, WIDTH)), aj.Moments()),
    head=aj.LinearHead(some(2, 3 + WIDTH + 8)),
    statistics={"mean": some(2)},
)
STATE = aj.CompiledState(PREDICTOR, SPEC, mark=jnp.zeros(()))
TEACHER = {"params": {"layer": {"kernel": some(2, 3), "scale": some()}}}


def result_of(state, teacher=None):
    variables = {**(teacher or TEACHER), "asap": aj.linen.state_tree({PATH: state})}
    return aj.CompileResult({PATH: state}, None, variables=variables)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.asap"


@pytest.fixture
def saved(path):
    aj.save(path, result_of(STATE))
    return path


def parts(path):
    """The header of a file, and its arrays."""
    raw = archive.entries(path.read_bytes())
    header = json.loads(archive.header(raw))
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return header, {n: x for n, x in arrays.items() if n not in (archive.HEADER, archive.DIGEST)}


def write(path, header, arrays):
    """A file with these contents and their right digest."""
    path.write_bytes(archive.pack(json.dumps(header).encode(), arrays))


# ------------------------------------------------------------------------------------ damaged files


def refused_or_equal(path, data):
    """Whether `load` refuses the contents; if not, it gives the saved state."""
    path.write_bytes(data)
    try:
        loaded = aj.load(path, like=TEACHER)
    except ValueError as error:
        if not str(error).startswith(str(path)):
            raise
        return True
    chex.assert_trees_all_equal(loaded["asap"]["layer"]["SinkhornAttention_0"]["state"], STATE)
    return False


def test_a_flipped_byte_is_refused_or_changes_nothing(saved):
    """Every eleventh byte; those that may change are dates and the like in the archive's lists."""
    whole = saved.read_bytes()
    refused = []
    for place in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        refused.append(refused_or_equal(saved, damaged))
    assert np.mean(refused) > 0.9


def test_a_truncated_file_is_refused(saved):
    whole = saved.read_bytes()
    assert all(refused_or_equal(saved, whole[:end]) for end in range(0, len(whole), 97))
    assert refused_or_equal(saved, whole[:-1])
    assert not refused_or_equal(saved, whole)


def test_a_changed_value_with_right_checksums_of_the_archive_is_refused(saved):
    """An edit with a tool that writes archives, which does not know of the digest."""
    with np.load(saved) as file:
        arrays = dict(file)
    name = f"{PATH}/predictor/head/coefficients"
    arrays[name] = arrays[name] + 1
    with open(saved, "wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(ValueError, match=f"{saved.name}: .* do not match their digest"):
        aj.load(saved, like=TEACHER)


def test_a_compressed_entry_is_refused_before_it_is_inflated(saved):
    with zipfile.ZipFile(saved, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("large.npy", bytes(20_000_000))
    assert saved.stat().st_size < 50_000
    with pytest.raises(ValueError, match="is compressed, which save never does"):
        aj.load(saved, like=TEACHER)


def test_an_array_that_claims_to_be_larger_than_the_file_is_refused(saved):
    header, _ = parts(saved)
    start = io.BytesIO()
    claim = {"descr": "<f4", "fortran_order": False, "shape": (10**12,)}
    np.lib.format.write_array_header_1_0(start, claim)
    raw = archive.entries(saved.read_bytes())
    raw = {name: content for name, content in raw.items() if name != archive.DIGEST}
    name = f"{PATH}/predictor/head/coefficients"
    raw[name] = start.getvalue() + bytes(8)
    fields = header["layers"][PATH]["fields"]["predictor"]["fields"]
    fields["head"]["fields"]["coefficients"]["shape"] = [10**12]
    content = json.dumps(header).encode()
    raw[archive.HEADER] = archive._npy(np.frombuffer(content, np.uint8))
    raw[archive.DIGEST] = archive._npy(np.frombuffer(archive._digest(raw), np.uint8))
    with zipfile.ZipFile(saved, "w") as file:
        for key, value in raw.items():
            file.writestr(f"{key}.npy", value)
    with pytest.raises(ValueError, match=f"{name}: 8 bytes are no float32"):
        aj.load(saved, like=TEACHER)


def zipped(save, *arrays, **named):
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


FOREIGN = {
    "random bytes": np.random.default_rng(0).bytes(500),
    "nothing": b"",
    "a pickle": pickle.dumps({"header": 1}),
    "an npy": zipped(np.save, np.ones(3)),
    "another npz": zipped(np.savez, weights=np.ones(3)),
    "a pickled npz": zipped(np.savez, header=np.array([{}], object)),
    "an empty npz": zipped(np.savez),
    "a zip start": b"PK\x03\x04" + bytes(100),
    "deep JSON": zipped(np.savez, header=np.frombuffer(b"[" * 100_000, np.uint8)),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_load_refuses_files_of_other_kinds(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name}: not"):
        aj.load(path, like=TEACHER)


def test_a_refused_file_is_closed(saved):
    """An open handle would warn when it is collected, and pin the file on some systems."""
    saved.write_bytes(saved.read_bytes()[:-40])
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(ValueError, match="not a complete asap_jax file") as error:
        aj.load(saved, like=TEACHER)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before
    assert error.value.__cause__ is not None


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        aj.load(tmp_path / "nowhere", like=TEACHER)
    with pytest.raises(OSError, match=tmp_path.name):
        aj.load(tmp_path, like=TEACHER)


# --------------------------------------------------------------- malformed, but with a right digest


def places(tree, way=()):
    """The way to every node of a JSON tree."""
    yield way
    if isinstance(tree, (dict, list)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(child, (*way, key))


def changed(tree, way, change):
    """A copy of a JSON tree in which `change(parent, key)` was called for one node."""
    tree = copy.deepcopy(tree)
    parent = tree
    for key in way[:-1]:
        parent = parent[key]
    change(parent, way[-1])
    return tree


def delete(parent, key):
    del parent[key]


VALUES = [None, True, -1, 1.5, float("nan"), 10**400, "x", [], {}, {"array": "header"}]


def put(value):
    return lambda parent, key: parent.__setitem__(key, value)


def runs(loaded):
    """Traces the layer of a loaded state."""
    state = loaded["asap"]["layer"]["SinkhornAttention_0"]["state"]
    tokens = jax.ShapeDtypeStruct((1, 5, 2, WIDTH), jnp.float32)
    settings = dict(spec=state.spec, closures=state.closures, ending=state.ending)
    run = lambda x: aj.asap_attention(x, x, x, predictor=state.predictor, **settings)
    jax.eval_shape(run, tokens)


def test_every_edit_of_the_header_is_refused_by_name_or_gives_a_state_that_runs(saved):
    header, arrays = parts(saved)
    refused, loaded = {}, 0
    for way in [way for way in places(header) if way and way[0] != "magic"]:
        for number, change in enumerate([delete, *map(put, VALUES)]):
            write(saved, changed(header, way, change), arrays)
            try:
                result = aj.load(saved, like=TEACHER)
            except ValueError as error:
                refused[way, number] = str(error)
            else:
                loaded += 1
                runs(result)
    names = lambda way: [str(key) for key in way if key not in ("fields", "tuple", "dict")][-2:]
    unnamed = {
        place: message
        for place, message in refused.items()
        if not any(name in message for name in names(place[0]))
    }
    assert not unnamed, "\n".join(f"{place}: {message}" for place, message in unnamed.items())
    assert len(refused) > 800
    assert loaded < 60  # another epsilon, scale, padding and the like


def state_of(header):
    return header["layers"][PATH]["fields"]


EDITS = {
    "a later format": (lambda h, a: h.update(format=99), "format 99 of asap_jax .*reads format"),
    "the format before": (lambda h, a: h.update(format=3), "format 3 .* save the model again"),
    "no layer": (lambda h, a: h.update(layers={}), "'layers' holds no layer"),
    "an unknown field": (lambda h, a: state_of(h).update(colour="red"), f"{PATH}: .*colour"),
    "an unused array": (lambda h, a: a.update(more=np.ones(3)), "does not name: .*'more'"),
    "an array that is not finite": (
        lambda h, a: a.update({f"{PATH}/predictor/statistics/mean": np.full(2, np.nan, "f4")}),
        "statistics/mean: holds a value that is not finite",
    ),
    "another marked stack": (
        lambda h, a: (
            a.update({f"{PATH}/mark": np.zeros(2, "f4")}),
            state_of(h)["mark"].update(shape=[2]),
        ),
        f"{PATH}'.*leading axes",
    ),
}


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_a_header_with_wrong_contents_is_refused(saved, change, message):
    header, arrays = parts(saved)
    write(saved, header, arrays)
    aj.load(saved, like=TEACHER)
    change(header, arrays)
    write(saved, header, arrays)
    with pytest.raises(ValueError, match=f"{saved.name}: .*{message}"):
        aj.load(saved, like=TEACHER)


def test_a_file_of_the_format_before_weights_loads(saved):
    header, arrays = parts(saved)
    assert header.pop("weights") is None
    write(saved, header | {"format": 4}, arrays)
    chex.assert_trees_all_equal(aj.load(saved, like=TEACHER), result_of(STATE).variables)


WEIGHT = "weights/params/layer/kernel"
WEIGHT_EDITS = {
    "other values": (
        lambda h, a: a.update({WEIGHT: a[WEIGHT] + 1}),
        "another teacher; .*\n  layer/kernel: same shape .* other values",
    ),
    "another shape": (
        lambda h, a: h["weights"]["params/layer/kernel"].update(shape=[3, 2]),
        f"{WEIGHT}: header says shape",
    ),
    "no array": (lambda h, a: a.pop(WEIGHT), f"array '{WEIGHT}' is missing"),
    "a number": (lambda h, a: h["weights"].update(more=3), "weights/more: expected an array"),
    "a list": (lambda h, a: h.update(weights=[]), "'weights' must be a dict or null"),
    "a weight below another": (
        lambda h, a: (
            h["weights"].update({"params/layer/scale/more": {**EMPTY, "array": "more"}}),
            a.update(more=np.zeros(0, "f4")),
        ),
        "weights/params/layer/scale/more: lies below another weight",
    ),
}
EMPTY = {"shape": [0], "dtype": "float32"}


@pytest.mark.parametrize(("change", "message"), WEIGHT_EDITS.values(), ids=WEIGHT_EDITS)
def test_edited_weights_are_refused(path, change, message):
    aj.save(path, result_of(STATE), weights=True)
    header, arrays = parts(path)
    write(path, header, arrays)
    chex.assert_trees_all_equal(aj.load(path), result_of(STATE).variables)
    change(header, arrays)
    write(path, header, arrays)
    with pytest.raises(ValueError, match=f"{path.name}: .*{message}"):
        aj.load(path)


MASS = RowMass((aj.Moments(),), aj.LinearHead(some(WIDTH + 8)))
KEY_SIDE = dataclasses.replace(PREDICTOR, side="key")
CANNOT_RUN = {
    "a row mass for the teacher's ending": (
        aj.CompiledState(dataclasses.replace(PREDICTOR, row_mass=MASS), SPEC),
        "row_mass is for ending='row'",
    ),
    "closures that end on the other side": (aj.CompiledState(KEY_SIDE, SPEC, 1), "ends on a col"),
    "coefficients for more features": (
        aj.CompiledState(
            dataclasses.replace(PREDICTOR, head=aj.LinearHead(some(2))), SPEC, mark=jnp.zeros(())
        ),
        r"coefficients of shape \(2,\) do not fit",
    ),
    "one predictor for two duals": (aj.CompiledState(PREDICTOR, SPEC, "none"), "a DualPair"),
    "no head": (aj.CompiledState(dataclasses.replace(PREDICTOR, head=None), SPEC), "a head"),
}


@pytest.mark.parametrize(("state", "message"), CANNOT_RUN.values(), ids=CANNOT_RUN)
def test_a_state_that_cannot_run_is_refused_when_it_is_loaded(path, state, message):
    aj.save(path, result_of(state))
    with pytest.raises(ValueError, match=f"layer '{PATH}': .*{message}"):
        aj.load(path, like=TEACHER)


def test_names_with_a_slash_are_not_mixed_up(path):
    statistics = {"a/b": some(1), "a": {"b": some(2)}}
    state = dataclasses.replace(PREDICTOR, statistics=statistics)
    with pytest.raises(ValueError, match="two arrays are named .*statistics/a/b"):
        aj.save(path, result_of(aj.CompiledState(state, SPEC)))
    teacher = {"params": {"a/b": some(1), "a": {"b": some(1)}}}
    with pytest.raises(ValueError, match="two parameters have the path 'a/b'"):
        aj.save(path, result_of(STATE, teacher))
    assert not path.exists()


@pytest.mark.parametrize("layers", [{}, {"elsewhere": STATE}], ids=["none", "another"])
def test_save_refuses_states_of_other_layers_than_those_of_the_model(path, layers):
    result = dataclasses.replace(result_of(STATE), states=layers)
    with pytest.raises(ValueError, match=rf"result has states of .*, but .* of \['{PATH}'\]"):
        aj.save(path, result)


def test_save_refuses_states_that_a_checkpoint_restored_without_types(path):
    with pytest.raises(TypeError, match=f"the state of layer '{PATH}' must be a CompiledState"):
        aj.save(path, result_of({"predictor": {}}))
    number = aj.CompiledState(dataclasses.replace(PREDICTOR, statistics={"n": 3}), SPEC)
    with pytest.raises(TypeError, match=r"predictor.statistics\['n'\] must be an array, got int 3"):
        aj.save(path, result_of(number))


# ------------------------------------------------------------------------------------ writing once


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_unchanged(saved, monkeypatch, step):
    before = saved.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        aj.save(saved, result_of(aj.CompiledState(PREDICTOR, SPEC)))
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_saving_into_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        aj.save(tmp_path / "no" / "model", result_of(STATE))


def test_saving_twice_gives_the_same_file(saved):
    before = saved.read_bytes()
    aj.save(str(saved), result_of(STATE))
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_saving_through_a_link_writes_its_target_and_keeps_the_mode(saved, tmp_path):
    link = tmp_path / "folder" / "link"
    link.parent.mkdir()
    link.symlink_to(saved)
    saved.write_bytes(b"old")
    saved.chmod(0o640)
    aj.save(link, result_of(STATE))
    assert link.is_symlink()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o640
    assert os.listdir(link.parent) == ["link"]
    aj.load(saved, like=TEACHER)


KILLED = """
import os, signal, sys
from asap_jax.artifact import replacing
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
replacing.write(sys.argv[1], memoryview(bytes(1000)))
"""


def test_the_next_save_deletes_the_drafts_of_killed_processes_only(saved):
    command = [sys.executable, "-c", KILLED, str(saved)]
    assert subprocess.run(command, timeout=240).returncode == -signal.SIGKILL
    (stale,) = (name for name in os.listdir(saved.parent) if name != saved.name)
    own = saved.parent / f"{saved.name}.{'0' * 32}.draft"
    others = [f"other.{'0' * 32}.draft", f"{saved.name}.draft", f"{saved.name}.{'0' * 32}"]
    for name in others:
        (saved.parent / name).write_bytes(b"1")
    with own.open("wb") as file:  # a process that writes this moment
        file.write(b"1")
        file.flush()
        assert replacing._lock(file.fileno())
        aj.save(saved, result_of(STATE))
        assert own.exists()
    assert stale not in os.listdir(saved.parent)
    aj.save(saved, result_of(STATE))
    assert sorted(os.listdir(saved.parent)) == sorted([saved.name, *others])
