#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the CUDA kernels by the lattice and the recorded words, then speed beside an older tree, on the GPU and on
# two cores. BEFORE: the folder of that tree. Prints one closing line for each run of the first part, and the benchmarks' tables.
set -u
export PYTHONPATH=. PYTHONUNBUFFERED=1 TCEMU_COMPILATION_CACHE=off XLA_PYTHON_CLIENT_PREALLOCATE=false
out=${OUT:-/tmp/step_kernels}; mkdir -p "$out"
nvidia-smi -L; lscpu | grep -E 'Model name'
for share in 0 1 2 3 4 5; do
    timeout 260 python3 tests/compare_lattice.py --paths cuda --share $share/6 >"$out/lattice_$share.txt" 2>&1 &
done
for family in 'mma' 'mma_sp movement' 'wmma' 'wgmma' 'wgmma_sp'; do
    timeout 260 python3 tests/replay_golden.py $family --execution emulated >"$out/golden_${family// /_}.txt" 2>&1 &
done
timeout 260 python3 -m pytest -q -p no:cacheprovider -m gpu tests/engine/backends/test_gpu.py >"$out/tests.txt" 2>&1 &
wait
for file in "$out"/*.txt; do echo "$(basename "$file" .txt): $(tail -n 1 "$file" | cut -c1-200)"; done
[ -n "${BEFORE:-}" ] || exit 0
gemm() { # tree, cores, further arguments
    PYTHONPATH=$1 TCEMU_KERNELS=$(mktemp -d) taskset -c "$2" timeout 150 python3 "$1/benchmarks/gemm.py" "${@:3}" 2>&1 | grep -v installed
}
{
    for tree in "$BEFORE" . "$BEFORE" .; do
        echo "GPU, $tree"; gemm "$tree" 8-15 --sizes 8192 --formats f16 bf16 e4m3 mxf8 nvf4
    done
} >"$out/gpu_speed.txt" 2>&1 &
export JAX_PLATFORMS=cpu
for tree in "$BEFORE" . "$BEFORE" .; do
    echo "CPU, $tree"; gemm "$tree" 0-1 --sizes 1024 --formats f16 bf16 tf32 e4m3 mxf8 nvf4
done
for tree in "$BEFORE" .; do
    echo "fuzz, $tree"; PYTHONPATH=$tree TCEMU_KERNELS=$(mktemp -d) taskset -c 2-3 timeout 60 python3 "$tree/benchmarks/fuzz.py" --repeats 2
    echo "GPT-2, $tree"; PYTHONPATH=$tree TCEMU_KERNELS=$(mktemp -d) taskset -c 2-3 timeout 60 python3 "$tree/benchmarks/model.py" --recipes bf16
done
wait
cat "$out/gpu_speed.txt"
