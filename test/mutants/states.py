"""Recurrent states: which node's a stage keeps, whose, and where checkpoints of them go."""

from __future__ import annotations

from mutant import CORE, Mutant

COMMIT = "test/contract/test_commit_cache.py"
HOST = "sglang_pp_spec/host/"
KERNELS = "test/unit/test_recurrent_kernels.py"
GROUP = "recurrent"

RECURRENT = [
    Mutant(
        GROUP,
        "an earlier stage leaves the state where verify left it",
        "18",
        HOST + "commit.py",
        "        if self.is_recurrent:\n",
        "        if self.is_recurrent and has_tree:\n",
        f"{COMMIT} -k chain_with_recurrent",
    ),
    Mutant(
        GROUP,
        "the state after the node behind the last accepted one",
        "18",
        CORE + "apply.py",
        "torch.where(nodes < num_accepted.unsqueeze(1), nodes, -1)",
        "torch.where(nodes <= num_accepted.unsqueeze(1), nodes, -1)",
        f"{COMMIT} -k chain_with_recurrent",
    ),
    Mutant(
        GROUP,
        "the rows of the whole batch for those that are left",
        "3, 18",
        HOST + "commit.py",
        "        batch.req_pool_indices = record.snapshot.req_pool_indices[take]\n",
        "        batch.req_pool_indices = record.snapshot.req_pool_indices[: len(owned)]\n",
        f"{COMMIT} -k has_ended_is_left_alone",
    ),
    Mutant(
        GROUP,
        "commit at another time's lengths",
        "18, 19",
        HOST + "commit.py",
        "record.seq_lens[take], slots[take]",
        "record.seq_lens[take] + 1, slots[take]",
        f"{COMMIT} -k takes_its_path",
    ),
    Mutant(
        GROUP,
        "checkpoints of the whole batch for those that are left",
        "3, 18",
        HOST + "commit.py",
        "            batch.mamba_track_indices = batch.mamba_track_indices[take]\n",
        "            batch.mamba_track_indices = batch.mamba_track_indices[: len(owned)]\n",
        f"{COMMIT} -k has_ended_is_left_alone",
    ),
    Mutant(
        GROUP,
        "no note of where a round's checkpoints go",
        "18",
        HOST + "turn.py",
        "        if batch.forward_mode.is_decode():",
        "        if not batch.forward_mode.is_decode():",
        f"{COMMIT} -k remembers_where",
    ),
    Mutant(
        GROUP,
        "overlap although the last state is kept",
        "18",
        HOST + "overlap.py",
        "    if _keeps_last_states(scheduler):\n",
        "    if _keeps_last_states(scheduler) and scheduler is None:\n",
        "test/contract/test_overlap.py -k in_the_way",
    ),
    Mutant(
        GROUP,
        "the CPU engine's verify goes on from the node before instead of the parent",
        "17, 18",
        "sglang_pp_spec/cpu_engine/recurrent.py",
        "            state = states[slot] if node == 0 else after[row, parent]\n",
        "            state = states[slot] if node == 0 else after[row, node - 1]\n",
        f"{KERNELS} -k verify_leaves",
    ),
    Mutant(
        GROUP,
        "a chunk's state is copied before the chunk ran",
        "18, 19",
        HOST + "engine.py",
        "        if scheduler.chunked_req is not None and self.state.is_recurrent:\n",
        "        if scheduler.chunked_req is not None and False:\n",
        "test/unit/test_kv_table_fence.py -k chunk_s_state",
    ),
    Mutant(
        GROUP,
        "a stage between keeps the embeddings of images",
        "24",
        HOST + "engine.py",
        "of_earlier_stages(proxy) | embeds_in(proxy)",
        "of_earlier_stages(proxy)",
        "test/unit/test_mm_embeds.py -k between",
    ),
    Mutant(
        GROUP,
        "the drafter does not get the embeddings of images",
        "24",
        HOST + "mm_embeds.py",
        "        result.logits_output.mm_input_embeds = received[KEY]\n",
        "        pass\n",
        "test/unit/test_mm_embeds.py -k drafter_finds",
    ),
    Mutant(
        GROUP,
        "a CUDA graph's output keeps the embeddings of the images before",
        "23",
        HOST + "mm_embeds.py",
        "    return PPProxyTensors({**output.tensors, KEY: embeds})\n",
        "    output.tensors[KEY] = embeds\n    return output\n",
        "test/unit/test_mm_embeds.py -k leaves_its_output",
    ),
]
