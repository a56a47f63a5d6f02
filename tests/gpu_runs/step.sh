#!/usr/bin/env bash
# On a machine with an NVIDIA GPU, and a CPU with AVX-512: the lattice of a step by every path, and the recorded words by every backend.
# Recordings are expected beside the repository, as tests/support/golden.py says. Prints one closing line for each run.
set -u
export PYTHONPATH=. PYTHONUNBUFFERED=1
out=${OUT:-/tmp/step}; mkdir -p "$out"
nvidia-smi -L; lscpu | grep -E 'Model name|avx512_vnni' | cut -c1-80
cpu() { JAX_PLATFORMS=cpu timeout 580 python3 "$@"; }
for path in llvm 'llvm without AVX-512' 'llvm by columns' portable 'portable, bounded'; do
    cpu tests/compare_lattice.py --paths "$path" >"$out/lattice ${path//,/}.txt" 2>&1 &
done
timeout 580 python3 tests/compare_lattice.py --paths cuda >"$out/lattice cuda.txt" 2>&1 &
cpu tests/replay_golden.py >"$out/golden llvm.txt" 2>&1 &
cpu tests/replay_golden.py --execution portable >"$out/golden portable.txt" 2>&1 &
wait
timeout 200 python3 tests/replay_golden.py --execution emulated >"$out/golden cuda.txt" 2>&1
for file in "$out"/*.txt; do echo "== $(basename "$file" .txt)"; tail -n 4 "$file" | cut -c1-300; done
