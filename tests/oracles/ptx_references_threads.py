"""What the kernels of reductions, control flow, shared memory, atomics and arithmetic compute."""

import math

import numpy as np

from .ptx_expected import ExpectedBuffer, reference, some_rows, to_signed

# ---- threads


@reference("tree_sum")
def _(x, _):
    return {1: ExpectedBuffer(x[0].reshape(2, 512).sum(1), 1e-5)}


@reference("largest")
def _(x, _):
    rows = np.where(np.isnan(x[0]), -np.inf, x[0])
    return {1: ExpectedBuffer(rows.max(1)), 2: ExpectedBuffer(rows.argmax(1))}


@reference("redux")
def _(x, _):
    warps = x[0].reshape(4, 32)
    odd = [np.bitwise_or.reduce(to_signed(np.where(warp & 1, warp, 0).sum()) * (warp & 1)) for warp in warps]
    greatest = (warps % 2**32).max(1)
    bits = np.bitwise_xor.reduce(warps, axis=1)
    return {1: ExpectedBuffer(np.stack([to_signed(warps.sum(1)), warps.min(1), to_signed(greatest), bits, odd], 1).reshape(20))}


@reference("block_scan")
def _(x, _):
    return {1: ExpectedBuffer(x[0].reshape(2, 96).cumsum(1).reshape(192))}


@reference("blelloch")
def _(x, _):
    blocks = x[0].reshape(2, 256)
    return {1: ExpectedBuffer((blocks.cumsum(1) - blocks).reshape(512), 1e-5)}


@reference("shuffles")
def _(x, _):
    v, lane = x[0].reshape(2, 32), np.arange(32)

    def taken(places, inside=True):
        return np.where(inside, v[:, places % 32], v)

    rows = [v[:, [5] * 32], np.stack([w[w & 31] for w in v]), taken(lane // 8 * 8 + lane * 3 % 8), taken(lane - 3, lane >= 3),
            taken(lane - 2, lane % 8 >= 2), taken(lane + 7, lane + 7 < 32), taken(lane + 3, lane % 16 + 3 < 16),
            taken(lane ^ 21)]  # fmt: skip
    rows[7] = np.where(lane % 2, to_signed(rows[7] + v[:, lane ^ 2]), rows[7])
    return {1: ExpectedBuffer(np.stack(rows, -1).reshape(64, 8)), 3: ExpectedBuffer(np.repeat(x[2].reshape(2, 32).sum(1), 32), 1e-12)}


@reference("handed_on")
def _(x, _):
    sums = []
    for block in x[0]:
        total = np.zeros(32, int)
        for i, row in enumerate(block):
            total = total * 3 + (row + i)[::-1]
        sums.append(to_signed(total))
    return {1: ExpectedBuffer(np.concatenate(sums))}


@reference("counted")
def _(x, _):
    out = []
    for block in x[0].reshape(2, 96):
        said = (block & 1).sum() * 1000 + (block > -90).all() * 100 + (block == 7).any() * 200
        out += [said + max(-(-int(block.max()) // 16), 0)] * 96
    return {1: ExpectedBuffer(np.array(out))}


@reference("collatz")
def _(x, numbers):
    size, limit, ceiling = numbers
    steps, highest = np.zeros(128, int), np.zeros(128, int)
    for i, n in enumerate(map(int, x[0][:size])):
        count = above = 0
        top = n
        while n != 1:
            above += n % 2 and n > ceiling
            if n % 2 and above == 8:
                break
            n = 3 * n + 1 if n % 2 else n // 2
            top, count = max(top, n), count + 1
            if count >= limit:
                break
        steps[i], highest[i] = -count if above == 8 else count, top
    return {1: ExpectedBuffer(steps), 2: ExpectedBuffer(highest)}


@reference("nested_breaks")
def _(x, numbers):
    found, tried = zip(*(_three_squares(int(target), numbers[0]) for target in x[0]), strict=True)
    return {1: ExpectedBuffer(np.array(found)), 2: ExpectedBuffer(np.array(tried))}


def _three_squares(target: int, size: int) -> tuple[int, int]:
    tries = 0
    for i in range(1, size):
        for j in range(i, size):
            if i * i + j * j > target:
                break
            for k in range(j, size):
                tries += 1
                total = i * i + j * j + k * k
                if total > target:
                    break
                if total == target:
                    return i << 16 | j << 8 | k, tries
                if tries % 17 != 3:
                    tries += k & 1
    return -1, tries


@reference("interpreter")
def _(x, numbers):
    return {2: ExpectedBuffer(np.array([_interpret(*row, numbers[0]) for row in zip(x[0], x[1], range(64), strict=True)]))}


def _interpret(program: np.ndarray, value: int, other: int, budget: int) -> int:
    at, word, value = 0, 2**32, int(value)
    for _ in range(budget):
        code = int(program[at])
        at, low, high = (at + 1) & 15, code & 15, code >> 4
        match low:
            case 0:
                value = (value + other) % word
            case 1:
                value = value * (other | 1) % word
            case 2:
                value ^= code * 0x01010101
            case 3:
                value, other = other, value
            case 4:
                value = value >> high | value << (32 - high & 31) % word & word - 1
            case 5:
                at = high if value & 1 else at
            case 6:
                at = (at + 1) & 15 if value > other else at
            case 7:
                other = value.bit_count() + high
            case 8:
                value %= other | 1
            case 9:
                return value ^ other
            case _:
                other = (other - (value >> 3)) % word
    return value


@reference("calls")
def _(x, _):
    low, high = x[0].min(1), x[0].max(1)
    divisor = [math.gcd(abs(a) + 1, abs(b) + 1) if i % 3 else -math.gcd(abs(b), 12) if i % 2 else 0
               for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True))]  # fmt: skip
    at = 0.5 + np.arange(64)
    cubic = sum(x[0][:, j] * 0.25 * at**j for j in range(4))
    return {1: ExpectedBuffer(np.stack([divisor, high - low], 1)), 2: ExpectedBuffer(cubic, 1e-6)}


@reference("transpose_padded", "transpose_swizzled")
def _(x, _):
    return {1: ExpectedBuffer(x[0].T)}


@reference("transpose_in_registers")
def _(x, _):
    halves = np.stack([x[0] & 0xFFFF, x[0] >> 16], -1).reshape(4, 8, 8).swapaxes(1, 2).reshape(128, 2)
    return {1: ExpectedBuffer(halves[:, 0] | halves[:, 1] << 16)}


@reference("bitonic")
def _(x, _):
    return {1: ExpectedBuffer(np.sort(x[0].reshape(2, 128), 1).reshape(256))}


@reference("histogram")
def _(x, _):
    return {1: ExpectedBuffer(np.bincount(x[0], minlength=256))}


@reference("filter")
def _(x, _):
    taps = np.array([0.03125, -0.25, 0.5, 1.0, 0.5, -0.25, 0.03125])
    padded = np.pad(x[0], 3)
    return {1: ExpectedBuffer(sum(taps[j] * padded[j : j + 300] for j in range(7)), 1e-6), 2: ExpectedBuffer(np.array([2, 1, 2]))}


@reference("atomics")
def _(x, _):
    slots, wide, held = x[0].reshape(32, 4).T, x[2], x[1].reshape(10, 4)
    u = slots % 2**32
    mask = 0x01010101 << np.arange(4)[:, None]
    inc, dec = [], []
    for i in range(4):
        up, down = int(held[7, i]) % 2**32, int(held[8, i]) % 2**32
        for _ in range(32):
            up, down = 0 if up >= 6 else up + 1, 9 if down == 0 or down > 9 else down - 1
        inc.append(up), dec.append(down)
    rows = [held[0] + slots.sum(1), held[1] - slots.sum(1), np.minimum(held[2], slots.min(1)), np.maximum(held[3], slots.max(1)),
            held[4] & np.bitwise_and.reduce(slots | 0x0F0F0F0F, 1), held[5] | np.bitwise_or.reduce(slots & mask, 1),
            held[6] ^ np.bitwise_xor.reduce(slots, 1), np.array(inc), np.array(dec), np.maximum(held[9] % 2**32, u.max(1))]  # fmt: skip
    big = [(int(wide[i]) + int(slots[i].sum()) * 2**20) % 2**64 for i in range(4)]
    big += [min(to_signed(int(wide[4 + i]), 64), *(v * v - 77 for v in slots[i].tolist())) % 2**64 for i in range(4)]
    big += [max(int(wide[8 + i]), *(v % 2**64 * 0x100000001 % 2**64 for v in slots[i].tolist())) for i in range(4)]
    small = np.fmod(slots, 1024).sum(1)
    return {
        1: ExpectedBuffer(to_signed(np.concatenate(rows))),
        2: ExpectedBuffer(np.array(big, object)),
        3: ExpectedBuffer(small),
        4: ExpectedBuffer(small * 0.5),
    }


@reference("swap_loop")
def _(x, _):
    return {1: ExpectedBuffer(np.array([x[0].max().astype(np.float32).view(np.uint32), 99])), 2: ExpectedBuffer(np.array([1234, 7]))}


@reference("spin_lock")
def _(x, _):
    checksum = np.bitwise_xor.reduce(np.arange(64) * 2654435761 % 2**32)
    return {0: ExpectedBuffer(np.zeros(1, int)), 1: ExpectedBuffer(np.full(1, 64)), 2: ExpectedBuffer(to_signed(checksum).reshape(1))}


@reference("chained_scan")
def _(x, _):
    sums = x[0].reshape(4, 32).sum(1)
    before = sums.cumsum() - sums
    handed = (x[0].reshape(4, 32) + before[:, None]).reshape(128)
    return {1: ExpectedBuffer(handed), 2: ExpectedBuffer(before + sums), 3: ExpectedBuffer(np.ones(4, int))}


@reference("compacted")
def _(x, numbers):
    kept = x[0][x[0] < numbers[0]]
    groups = []
    for warp in x[0].reshape(4, 32):
        same = [sum(1 << j for j in range(32) if warp[j] & 7 == warp[i] & 7) for i in range(32)]
        odd = sum(1 << j for j in range(32) if warp[j] & 1)
        groups += [[mask, 0, odd, int((warp == 3).any()) + 2 * int((warp < 100).all())] for mask in same]
    padded, counted = np.pad(kept, (0, 128 - len(kept))), np.array([len(kept), kept.sum()])
    return {1: ExpectedBuffer(np.sort(padded)), 2: ExpectedBuffer(counted), 3: ExpectedBuffer(np.reshape(groups, 512))}


# ---- numbers


@reference("floats")
def _(x, _):
    a, b = (y.astype(np.float32) for y in x[:2])
    rows = {0: a + b, 4: a * b, 12: a / b, 14: 1 / a, 15: np.sqrt(a), 19: abs(a), 20: -b, 22: np.trunc(a), 25: np.rint(a)}
    return {3: ExpectedBuffer(some_rows(rows, 28, 128))}


@reference("doubles")
def _(x, _):
    a, b = x[:2]
    return {
        2: ExpectedBuffer(some_rows({0: a + b, 2: a * b, 6: a / b, 7: np.sqrt(abs(a)), 8: 1 / b, 11: np.floor(a), 12: np.rint(b)}, 16, 64))
    }


@reference("hashes")
def _(x, numbers):
    word, z, y = 2**64, np.zeros((numbers[0], 64), int), []
    for i, state in enumerate(map(int, x[0])):
        hashed = 0x9E3779B185EBCA87 + i
        for j in range(numbers[0]):
            mixed, turn = ((state >> 18 ^ state) >> 27) % 2**32, state >> 59
            z[j, i] = (mixed >> turn | mixed << (-turn & 31)) % 2**32
            state = (state * 6364136223846793005 + 1442695040888963407) % word
            hashed ^= state * 0xC2B2AE3D27D4EB4F % word
            hashed = (hashed << 31 | hashed >> 33) % word * 0x9E3779B185EBCA87 % word
        y.append((hashed ^ hashed >> 33) * 0x165667B19E3779F9 % word)
    return {1: ExpectedBuffer(np.array(y, object)), 2: ExpectedBuffer(z)}


@reference("local_arrays")
def _(x, _):
    sums = []
    for row in x[2].tolist():
        ring, total = [0] * 16, 0
        for byte in row:
            ring[byte & 15] = (ring[byte & 15] + byte) % 256
            total = (total * 31 + ring[byte >> 4]) % 2**32
        sums.append(total)
    return {1: ExpectedBuffer(np.sort(x[0], 1)), 3: ExpectedBuffer(np.array(sums))}


@reference("approximations")
def _(x, _):
    a = x[0]
    rows = [1 / a, np.sqrt(a), 1 / np.sqrt(a), 2.0**a, np.log2(a), np.sin(a), np.cos(a), np.tanh(a), 1.7 / a, 1.7 / a]
    return {1: ExpectedBuffer(np.stack(rows), 1e-3)}


@reference("sines")
def _(x, _):
    return {1: ExpectedBuffer(np.stack([np.sin(x[0]), np.arctan2(x[0], 0.75), np.log1p(abs(x[0]))]), 1e-6)}


@reference("exponentials")
def _(x, _):
    erf = np.vectorize(math.erf)
    return {1: ExpectedBuffer(np.ma.masked_greater(np.stack([np.exp(x[0]), np.tanh(x[0]), erf(x[0]), np.cbrt(x[0])]), 1e30), 1e-3)}
