# The models that run_one_gpu.sh and run_multi_gpu.sh measure; both source this. Each function prints the folder of
# target/ and draft/ (written last), made on the spot. Uses $python.

small_model() { # 1.2 billion parameters with random weights, or what MODEL names
    local folder=${MODEL:-${TMPDIR:-/tmp}/pp_spec_random_24x2048}
    [ -d "$folder/draft" ] || "$python" -m benchmark.random_model "$folder" --layers 24 --hidden 2048 >&2 || return
    echo "$folder"
}

large_model() { # LAYERS of 0.4 billion parameters, a config alone: SGLang makes the weights up (--load-format dummy)
    local folder=${TMPDIR:-/tmp}/pp_spec_random_$1x6144
    [ -d "$folder/draft" ] ||
        "$python" -m benchmark.random_model "$folder" --layers "$1" --hidden 6144 --config-only >&2 || return
    echo "$folder"
}
