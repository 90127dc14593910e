"""All stages on one GPU, for development: NCCL refuses two ranks on a device, so messages go through CUDA IPC.

On with SGLANG_PP_SPEC_COLOCATED=1. ``backend.py`` is a torch.distributed backend like NCCL's, so the frame channel,
the hidden states and SGLang's own transfers run over it unchanged, with or without this plugin's scheduler;
``ring.py`` moves the messages and keeps them on the stream; ``memory.py`` is what two processes share; ``hooks.py``
puts every stage on device 0 and the backend in place. Both stages share one GPU's time: no figure from this mode says
how fast two GPUs are.
"""
