// A warp's factors as significands and exponents in integers, which every arithmetic can take: each has its magnitude, its sign and its exponent,
// a word each, and four factors lie together.

[[maybe_unused]] constexpr bool AHEAD = false;  // the next instruction's words are loaded while one's steps go
constexpr int PIECE = TERMS % 4 == 0 ? 4 : 1;  // products whose factors are read together
constexpr int PARTS_APART = 4;                 // words between a factor's magnitude, sign and exponent; four factors lie together
constexpr bool HALVES = CHUNK == 2;            // metadata choose halves of B's elements, so that B is decoded when it has been chosen
constexpr int ABOVE = FRACTION_BITS > MANTISSAS ? FRACTION_BITS - MANTISSAS : 0, BELOW = ABOVE - FRACTION_BITS + MANTISSAS;

// A factor as steps read it. up: of the magnitudes, so that products are in units where that takes a shift to the left
struct Parts {
    u32 magnitude;
    int sign, exponent;  // sign: +1 or -1
    __device__ __forceinline__ Factor factor(int up) const { return {(int)(magnitude >> up) * sign, exponent}; }
};

__device__ __forceinline__ Parts parts_of(Factor absolute, int sign_mask) {
    return {(u32)absolute.significand, sign_mask | 1, absolute.exponent};
}

constexpr int ROW_UP = TRUNCATES_WORDS ? ABOVE : 0;

// The factors of all codes of a format of few bits, without their signs: then a code is decoded by one load
template <class STORED, int BITS, int UP> struct Table {
    static constexpr bool used = BITS <= 8 && !HALVES;
    static constexpr int codes = used ? 1 << (BITS - 1) : 1;
    static __device__ __forceinline__ void fill(Words2 *table) {
#pragma unroll 1
        for (int code = threadIdx.x; used && code < codes; code += 32 * WARPS) {
            const Factor x = STORED::magnitude(code);
            table[code] = {(u32)x.significand << UP, (u32)x.exponent};
        }
    }
    static __device__ __forceinline__ Factor of(const Words2 *table, u32 code) {
        if constexpr (used) {
            const Words2 w = table[code & (codes - 1)];
            return {(int)w.x, (int)w.y};
        } else {
            const Factor x = STORED::magnitude(code);
            return {x.significand << UP, x.exponent};
        }
    }
};
typedef Table<AStored, A_BITS, ROW_UP> ATable;
typedef Table<BStored, B_BITS, 0> BTable;
struct Tables {
    Words2 a[ATable::codes], b[BTable::codes];
    static constexpr bool used = ATable::used || BTable::used;
    __device__ __forceinline__ void fill() { ATable::fill(a), BTable::fill(b); }
};

// Some factors that lie one after the other in their line
template <int COUNT> __device__ __forceinline__ void write_parts(u32 *to, const Parts (&parts)[COUNT]) {
    u32 words[3][COUNT];
#pragma unroll
    for (int v = 0; v < COUNT; ++v) words[0][v] = parts[v].magnitude, words[1][v] = (u32)parts[v].sign, words[2][v] = (u32)parts[v].exponent;
#pragma unroll
    for (int part = 0; part < 3; ++part) store_words(to + part * PARTS_APART, words[part]);
}

// ---- what a lane reads: its rows, and its columns

struct Lines {
    u32 *lines;                 // of the warp
    const u32 *rows, *columns;  // where the lane's first ones begin
    u32 fields[ROWS_OF_LANE][FIELD_WORDS];  // metadata of its rows, four bits a chunk

    __device__ __forceinline__ Lines(u32 *memory, int lane);
    __device__ __forceinline__ void write(const Tables &tables, const Words<A_WORDS> &x, const Words<B_WORDS> &y, const OfBatch &given, int lane);
    __device__ __forceinline__ const u32 *row(int i, int at) const { return rows + row_place(i) + (at / 4 * 12 + at % 4); }
    __device__ __forceinline__ const u32 *column(int j, int at) const { return columns + column_place(j) + (at / 4 * 12 + at % 4); }

    // sparse: where in a column the element is that product `at` of row i meets; `which`: of the two units that a field names, for halves
    __device__ __forceinline__ int unit(int i, int chunk, int which) const {
        const u32 word = FIELD_WORDS == 1 || chunk < 8 ? fields[i][0] : fields[i][FIELD_WORDS - 1];
        const int named = (int)(word >> (chunk % 8 * 4 + which * 2) & 3);
        return !CLAMPED ? named : which ? max(named, 1) : min(named, 2);
    }
    __device__ __forceinline__ Parts met(int i, int j, int at) const {
        const int in_group = at % PADDED, product = dealt(in_group, at / PADDED);
        if (OF_GROUP % TERMS != 0 && in_group >= OF_GROUP) return {0, 1, ZERO_EXPONENT};
        constexpr int STORED = CHUNK ? CHUNK / 2 : 1, PAIR = CHUNK > 4 ? CHUNK / 4 : 1;
        const int chunk = product / STORED, within = product % STORED;
        const u32 *line = columns + column_place(j);
        if constexpr (HALVES) {
            const int first = unit(i, chunk, 0), second = unit(i, chunk, 1);
            const u32 low = line[chunk * 2 + first / 2] >> first % 2 * 16 & 0xFFFF, high = line[chunk * 2 + second / 2] >> second % 2 * 16 << 16;
            return parts_of(BStored::magnitude(low | high), BStored::sign_mask(low | high));
        } else {
            const Words4 w = *(const Words4 *)(line + (chunk * CHUNK + unit(i, chunk, within / PAIR) * PAIR + within % PAIR) * 4);
            return {w.x, (int)w.y, (int)w.z};
        }
    }
};

// Factors of the lane's columns for as many products; of a sparse instruction each row meets its own
template <int COUNT> struct Columns {
    Parts v[SPARSE ? ROWS_OF_LANE : 1][COLUMNS_OF_LANE][COUNT];
    __device__ __forceinline__ const Parts &at(int i, int j, int t) const { return v[SPARSE ? i : 0][j][t]; }
};

template <int COUNT> __device__ __forceinline__ void read_line(Parts (&to)[COUNT], const u32 *from, bool exponents_only) {
    const Words<COUNT> exponents = load_words<COUNT>(from + 2 * PARTS_APART);
#pragma unroll
    for (int t = 0; t < COUNT; ++t) to[t].exponent = (int)exponents.v[t];
    if (exponents_only) return;
    const Words<COUNT> magnitudes = load_words<COUNT>(from), signs = load_words<COUNT>(from + PARTS_APART);
#pragma unroll
    for (int t = 0; t < COUNT; ++t) to[t].magnitude = magnitudes.v[t], to[t].sign = (int)signs.v[t];
}

template <int COUNT>
__device__ __forceinline__ void read_factors(Parts (&x)[ROWS_OF_LANE][COUNT], Columns<COUNT> &y, const Lines &of, int at, bool exponents_only) {
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i) read_line(x[i], of.row(i, at), exponents_only);
#pragma unroll
    for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
        if constexpr (!SPARSE) {
            read_line(y.v[0][j], of.column(j, at), exponents_only);
        } else {
#pragma unroll
            for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
                for (int t = 0; t < COUNT; ++t) y.v[i][j][t] = of.met(i, j, at + t);
        }
    }
}

// The factors of one step of one element of D, for the step in integers of any width
struct RowFactors {
    const Lines &of;
    int i, first;
    __device__ __forceinline__ Factor operator()(int t) const {
        const u32 *from = of.row(i, first + t);
        return Parts{from[0], (int)from[PARTS_APART], (int)from[2 * PARTS_APART]}.factor(ROW_UP);
    }
};
struct ColumnFactors {
    const Lines &of;
    int i, j, first;
    __device__ __forceinline__ Factor operator()(int t) const {
        if constexpr (SPARSE) {
            return of.met(i, j, first + t).factor(0);
        } else {
            const u32 *from = of.column(j, first + t);
            return Parts{from[0], (int)from[PARTS_APART], (int)from[2 * PARTS_APART]}.factor(0);
        }
    }
};

// Rule 8, of the elements whose step has a special among its factors or as its accumulator: what it gives
__device__ __forceinline__ void special_steps(Codes &ends, const Codes &codes, const Numbers &max_exponent, const Lines &of, int first, bool without) {
    float totals[ROWS_OF_LANE][COLUMNS_OF_LANE];
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
        const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
        totals[i][j] = special_value(without ? 0 : codes[i][j]);
    }
#pragma unroll 1
    for (int t = 0; t < TERMS; t += PIECE) {
        Parts x[ROWS_OF_LANE][PIECE];
        Columns<PIECE> y;
        read_factors<PIECE>(x, y, of, first + t, false);
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v)
#pragma unroll
            for (int w = 0; w < PIECE; ++w) {
                const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
                totals[i][j] = __fadd_rn(totals[i][j], __fmul_rn(class_of(x[i][w].factor(ROW_UP)), class_of(y.at(i, j, w).factor(0))));
            }
    }
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
        const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
        if (max_exponent[i][j] > SPECIAL_EXPONENT / 2) ends[i][j] = special_result(totals[i][j], 0);
    }
}

// One step of all elements of the lane, where terms are truncated toward zero and a product in units fits 31 bits: see `fused_step`
__device__ __forceinline__ void fast_step(Codes &codes, const Lines &of, int first, bool without) {
    Numbers max_exponent, sums;
    s64 totals[ROWS_OF_LANE][COLUMNS_OF_LANE];
    Parts x[ROWS_OF_LANE][PIECE];
    Columns<PIECE> y;
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
        const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
        max_exponent[i][j] = without ? FLOOR : max(RESULT::decode(codes[i][j]).exponent, FLOOR), sums[i][j] = 0, totals[i][j] = 0;
    }
#pragma unroll
    for (int t = 0; t < TERMS; t += PIECE) {
        read_factors<PIECE>(x, y, of, first + t, true);
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
            const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
#pragma unroll
            for (int w = 0; w < PIECE; ++w) max_exponent[i][j] = max(max_exponent[i][j], x[i][w].exponent + y.at(i, j, w).exponent);
        }
    }
    int top = FLOOR;
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) top = max(top, max_exponent[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE]);
    pause();
#pragma unroll
    for (int t = 0; t < TERMS; t += PIECE) {
        read_factors<PIECE>(x, y, of, first + t, false);
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
            const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
#pragma unroll
            for (int w = 0; w < PIECE; ++w) {
                const Parts &p = x[i][w], &q = y.at(i, j, w);
                const int right = max_exponent[i][j] + BELOW - p.exponent - q.exponent;
                sums[i][j] += truncate_product(p.magnitude, q.magnitude, p.sign * q.sign, right);
                if ((t + w) % TERMS_OF_SUM == TERMS_OF_SUM - 1) totals[i][j] += sums[i][j], sums[i][j] = 0;
            }
        }
    }
    Codes ends;
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
        const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
        ends[i][j] = end_of_step(totals[i][j] + sums[i][j], without ? 0 : codes[i][j], max_exponent[i][j]);
    }
    if (__any_sync(0xFFFFFFFF, top > SPECIAL_EXPONENT / 2)) special_steps(ends, codes, max_exponent, of, first, without);
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) codes[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE] = ends[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE];
}

__device__ __forceinline__ void step(Codes &codes, const Lines &of, int first, bool without) {
    if constexpr (TRUNCATES_WORDS) {
        fast_step(codes, of, first, without);
    } else {
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
            const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
            codes[i][j] = fused_step(RowFactors{of, i, first}, ColumnFactors{of, i, j, first}, codes[i][j], without);
        }
    }
}

// the factors of A into the warp's shared memory
__device__ __forceinline__ void write_rows(u32 *lines, const Tables &tables, const Words<A_WORDS> &words, const u8 *scales, const Selected &selected, int lane) {
    u32 *to = lines + a_place_of_lane(lane);
#pragma unroll
    for (int i = 0; i < A_ELEMENTS; i += A_RUN) {
        Parts parts[A_RUN];
#pragma unroll
        for (int v = 0; v < A_RUN; ++v) {
            const u32 code = code_of<A_BITS, A_CONTAINER, A_SHIFT>(words, i + v);
            Factor x = ATable::of(tables.a, code);
#if SCALED
            const int holder = a_scale_lane_of_lane(lane) + a_scale_lane(i + v) + a_scale_lane_by(selected.a_group, selected.a_thread);
            const int byte = a_scale_number_of_lane(lane) + a_scale_number(i + v) + a_scale_number_by(selected.a_group, selected.a_thread);
            x = A::scaled(x, scales[holder * 4 + byte]);
#endif
            parts[v] = parts_of(x, AStored::sign_mask(code));
        }
        write_parts(to + a_place(i), parts);
    }
}

// those of B; a sparse instruction's one by one, since rows choose among them, and as codes where they choose halves
__device__ __forceinline__ void write_columns(u32 *lines, const Tables &tables, const Words<B_WORDS> &words, const u8 *scales, const Selected &selected, int lane) {
    u32 *to = lines + COLUMNS_BEGIN + b_place_of_lane(lane);
#pragma unroll
    for (int i = 0; i < B_ELEMENTS; i += B_RUN) {
        Parts parts[B_RUN];
#pragma unroll
        for (int v = 0; v < B_RUN; ++v) {
            const u32 code = code_of<B_BITS, B_CONTAINER, B_SHIFT>(words, i + v);
            if constexpr (HALVES) {
                to[b_place(i + v)] = code;
                continue;
            }
            Factor x = BTable::of(tables.b, code);
#if SCALED
            const int holder = b_scale_lane_of_lane(lane) + b_scale_lane(i + v) + b_scale_lane_by(selected.b_group, selected.b_thread);
            const int byte = b_scale_number_of_lane(lane) + b_scale_number(i + v) + b_scale_number_by(selected.b_group, selected.b_thread);
            x = B::scaled(x, scales[holder * 4 + byte]);
#endif
            parts[v] = parts_of(x, BStored::sign_mask(code));
        }
        if constexpr (HALVES) continue;
        if constexpr (SPARSE) *(Words4 *)(to + b_place(i)) = {parts[0].magnitude, (u32)parts[0].sign, (u32)parts[0].exponent, 0};
        else write_parts(to + b_place(i), parts);
    }
}

// what fills the last step of a group takes no part
__device__ __forceinline__ void fill(u32 *lines, int lane) {
    for (int line = lane; line < (SPARSE ? A_LINES : A_LINES + B_LINES); line += 32)
        for (int group = 0; group < GROUPS; ++group)
            for (int at = group * PADDED + OF_GROUP; at < (group + 1) * PADDED; ++at) {
                u32 *to = lines + (line < A_LINES ? line * ROW_STRIDE : COLUMNS_BEGIN + (line - A_LINES) * COLUMN_STRIDE) + (at / 4 * 12 + at % 4);
                to[0] = 0, to[PARTS_APART] = 1, to[2 * PARTS_APART] = (u32)ZERO_EXPONENT;
            }
}

#if SPARSE
// the metadata of the lane's rows
__device__ __forceinline__ void read_fields(Lines &of, const u32 *words, const Selected &selected, int lane) {
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i) {
#pragma unroll
        for (int v = 0; v < FIELD_WORDS; ++v) of.fields[i][v] = 0;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const u32 word = words[field_lane_of_lane(lane) + field_lane(i * CHUNKS + chunk) + field_lane_by(selected.metadata)];
            const u32 field = word >> 4 * (field_number_of_lane(lane) + field_number(i * CHUNKS + chunk) + field_number_by(selected.metadata)) & 15;
            of.fields[i][chunk / 8] |= field << chunk % 8 * 4;
        }
    }
}
#endif

__device__ __forceinline__ Lines::Lines(u32 *memory, int lane)
    : lines(memory), rows(memory + row_place_of_lane(lane)), columns(memory + COLUMNS_BEGIN + column_place_of_lane(lane)), fields{} {
    fill(memory, lane);
}

__device__ __forceinline__ void Lines::write(const Tables &tables, const Words<A_WORDS> &x, const Words<B_WORDS> &y, const OfBatch &given, int lane) {
#if SPARSE
    read_fields(*this, given.fields, given.selected, lane);
#endif
    write_rows(lines, tables, x, given.a_scales, given.selected, lane);
    write_columns(lines, tables, y, given.b_scales, given.selected, lane);
}
