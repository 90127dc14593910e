"""Colocated stages are refused where they cannot work, and change nothing but what they must."""

import contextlib

import pytest

from sglang_pp_spec.colocated import hooks


def host_group(group_ranks, local_rank, backend, **options):
    return options


def test_it_is_refused_on_a_device_that_is_no_gpu():
    with pytest.raises(SystemExit, match="COLOCATED.*device cpu"):
        hooks.ipc_on_cuda(lambda device: "gloo", "cpu")


def test_several_tensor_parallel_ranks_are_refused():
    with pytest.raises(SystemExit, match="--tp-size 1"):
        hooks.build_group_without_pynccl(host_group, [[0, 1]], 0, "x", group_name="tp")


def test_a_pipeline_group_is_built_without_nccl():
    options = hooks.build_group_without_pynccl(host_group, [[0, 1]], 0, "x", group_name="pp", use_pynccl=True)
    assert options == {"group_name": "pp", "use_pynccl": False, "use_custom_allreduce": False}


def test_every_stage_is_on_device_0():
    @contextlib.contextmanager
    def host(gpu_id):
        yield gpu_id

    with hooks.on_device_0(host, 3) as device:
        assert device == 0
