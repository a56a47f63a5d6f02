#!/usr/bin/env bash
# On a machine with an NVIDIA GPU of sm_90a and a CPU with AVX-512: all that only a GPU can show of this tree, beside the mutants,
# which keep the cores busy. Recordings are expected beside the repository, as tests/support/golden.py says.
# Prints one closing line for each run; each has LIMIT seconds.
set -u
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. PYTHONUNBUFFERED=1 TCEMU_COMPILATION_CACHE=off XLA_PYTHON_CLIENT_PREALLOCATE=false
out=${OUT:-/tmp/whole_tree}; mkdir -p "$out"
limit=${LIMIT:-520}
nvidia-smi -L; lscpu | grep -E 'Model name'
python() { timeout "$limit" python3 "$@"; }
for share in 0 1 2; do
    python tests/compare_lattice.py --paths cuda --share $share/3 >"$out/lattice_$share.txt" 2>&1 &
done
for family in 'mma movement' 'mma_sp' 'wmma' 'wgmma' 'wgmma_sp'; do
    python tests/replay_golden.py $family --execution emulated >"$out/golden_${family// /_}.txt" 2>&1 &
done
for file in engine/backends/test_gpu engine/backends/test_native_gpu engine/backends/test_silicon_gpu faces/pytorch/test_torch_gpu; do
    python -m pytest -q -p no:cacheprovider -m gpu "tests/$file.py" >"$out/$(basename $file).txt" 2>&1 &
done
for subject in description loops cuda; do
    timeout "$limit" nice python3 tests/mutate_step.py --subject $subject --workers 5 --table "$out/mutants_$subject.jsonl" >"$out/mutants_$subject.txt" 2>&1 &
done
wait
for file in "$out"/*.txt; do echo "$(basename "$file" .txt): $(tail -n 1 "$file" | cut -c1-300)"; done
