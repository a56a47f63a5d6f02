"""How does a product grow with the devices? `python benchmarks/scaling.py`: a gemm with N sharded, and a batch of gemms, on 1, 2, 4, ....

Each line is the best of several runs after the first. "of linear" is the time of one device, divided by the time and the number of
devices.
"""

import jax
import numpy as np
from harness import arguments, describe_machine, finish, timed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tcemu

OP, TARGET = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_90a"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=int, default=1024, help="M, N and K of the one product; the batch is of half of that")
    args = parser.parse_args()
    machine = describe_machine()
    counts = [1 << at for at in range(len(jax.devices()).bit_length())]
    rng, n, h = np.random.default_rng(0), args.size, args.size // 2
    one = [rng.standard_normal(shape, np.float32) for shape in ((n, n), (n, n))]
    many = [rng.standard_normal(shape, np.float32) for shape in ((counts[-1] * 2, h, h), (counts[-1] * 2, h, h))]
    kinds = {"N": (one, (PartitionSpec(), PartitionSpec(None, "d"))), "batch": (many, (PartitionSpec("d"), PartitionSpec("d")))}
    product = jax.jit(lambda a, b: tcemu.gemm(a, b, op=OP, target=TARGET))
    print(f"{'sharded':>8} {'devices':>8} {'first call s':>13} {'best s':>9} {'MAC/s':>10} {'of linear':>10}")
    lines, wrong = [], 0
    for kind, (operands, specs) in kinds.items():
        alone = first_result = None
        for count in counts:
            mesh = Mesh(np.array(jax.devices()[:count]), ("d",))
            a, b = (jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(operands, specs, strict=True))
            first, best = timed(lambda a=a, b=b: product(a, b), args.repeats)
            alone, d = alone or best, np.asarray(product(a, b))
            first_result = d if first_result is None else first_result
            wrong += int((d.view(np.uint32) != first_result.view(np.uint32)).sum())
            work = operands[0].size * operands[1].shape[-1]
            line = {"sharded": kind, "devices": count, "first_call_s": first, "best_s": best, "mac_per_s": work / best}
            lines.append(line | {"of_linear": alone / best / count})
            print(f"{kind:>8} {count:>8} {first:>13.2f} {best:>9.4f} {work / best:>10.2e} {alone / best / count:>10.2f}")
    return finish(args, machine, lines, wrong, "the words of all device counts against one device")


if __name__ == "__main__":
    raise SystemExit(main())
