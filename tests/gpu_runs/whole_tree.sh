#!/usr/bin/env bash
# On a machine with an NVIDIA GPU of sm_90a and a CPU with AVX-512, in two parts:
#   bash tests/gpu_runs/whole_tree.sh words     all that only a GPU can show: lattices, recorded words, the tests of the GPU
#   bash tests/gpu_runs/whole_tree.sh mutants   the mutants of the loops and of the CUDA texts, and the figures of the claims
# Recordings are expected beside the repository, as tests/support/golden.py says. Prints one closing line for each run, which has LIMIT
# seconds; OUT/PART.tgz has what they wrote. SURVIVORS: a table of mutants of the CUDA texts that no CPU found, for the GPU.
set -u
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. PYTHONUNBUFFERED=1 TCEMU_COMPILATION_CACHE=off XLA_PYTHON_CLIENT_PREALLOCATE=false
part=${1:-words} limit=${LIMIT:-520} survivors=${SURVIVORS:-}
out=$(mktemp -d)/$part; mkdir -p "$out"
nvidia-smi -L; lscpu | grep -E 'Model name'
python() { timeout "$limit" python3 "$@"; }
test_files() { python -m pytest -v -n "$1" -p no:cacheprovider -p no:benchmark -m gpu "tests/$2.py" >"$out/$(basename "$2").txt" 2>&1; }
if [ -n "$survivors" ]; then
    python tests/gpu_runs/mutants_on_gpu.py "$survivors" "$out/survivors.jsonl" >"$out/survivors.txt" 2>&1 &
fi
if [ "$part" = words ]; then
    for share in 0 1 2; do
        python tests/compare_lattice.py --paths cuda --share $share/3 >"$out/lattice_$share.txt" 2>&1 &
    done
    for family in 'mma movement' 'mma_sp' 'wmma' 'wgmma' 'wgmma_sp'; do
        python tests/replay_golden.py $family --execution emulated >"$out/golden_${family// /_}.txt" 2>&1 &
    done
    test_files 5 engine/backends/test_gpu &
    test_files 3 engine/backends/test_native_gpu &
    (test_files 0 engine/backends/test_silicon_gpu; test_files 0 faces/pytorch/test_torch_gpu) &
else
    for subject in loops cuda; do
        python tests/mutate_step.py --subject $subject --workers 5 --table "$out/mutants_$subject.jsonl" >"$out/mutants_$subject.txt" 2>&1 &
    done
    (JAX_PLATFORMS=cpu python tests/renew_claims.py >"$out/claims.txt" 2>&1; cp tests/claims_quick.json "$out") &
fi
wait
tar czf "${OUT:-/tmp}/$part.tgz" -C "$(dirname "$out")" "$part"
for file in "$out"/*.txt; do echo "$(basename "$file" .txt): $(tail -n 1 "$file" | cut -c1-300)"; done
