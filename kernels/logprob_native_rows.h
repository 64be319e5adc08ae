// The arithmetic of logprob_native.cpp, which includes this once per instruction set: VARIANT names it, TARGET is the
// attribute that compiles a function for it, LANES its floats in a vector. A helper must be compiled for the same
// instruction set as its caller, or it would work on pieces of the vectors.

#define INLINE TARGET inline __attribute__((always_inline))

namespace {
namespace VARIANT {

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

INLINE Floats splat(float value) { return Floats{} + value; }

INLINE Floats load(const float *from) {
    Floats values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE Floats load(const uint16_t *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

INLINE void store(float *to, Floats values) { memcpy(to, &values, sizeof values); }

INLINE void store(uint16_t *to, Floats values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    const Words nan = Words{} + 0x7fc0;                                // rounding could carry a NaN into another number
    const Halves halves = __builtin_convertvector(values != values ? nan : rounded, Halves);
    memcpy(to, &halves, sizeof halves);
}

// The last columns of a row, fewer than LANES, followed by logits that change no maximum and no sum.
template <typename Element> INLINE Floats load_some(const Element *from, int64_t count) {
    Element padded[LANES];
    store(padded, splat(-INFINITY));
    for (int64_t i = 0; i < count; i++) padded[i] = from[i];
    return load(padded);
}

template <typename Element> INLINE void store_some(Element *to, Floats values, int64_t count) {
    Element padded[LANES];
    store(padded, values);
    for (int64_t i = 0; i < count; i++) to[i] = padded[i];
}

INLINE Floats larger(Floats x, Floats y) { return x > y ? x : y; }  // y where x is NaN

// e^z within 1.1 ulp; 0 where that is subnormal, NaN for NaN.
INLINE Floats exponential(Floats z) {
    const Floats bounded = z > splat(89.0f) ? splat(89.0f) : z;  // infinite from there on
    const Floats magic = splat(12582912.0f);                     // 1.5 x 2^23: adding it rounds to an integer
    const Floats shifted = bounded * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first of few bits
    Floats tail = r * 1.9875691500e-4f + 1.3981999507e-3f;
    tail = tail * r + 8.3334519073e-3f;
    tail = tail * r + 4.1665795894e-2f;
    tail = tail * r + 1.6666665459e-1f;
    tail = tail * r + 5.0000001201e-1f;
    const Floats mantissa = tail * (r * r) + r + 1.0f;
    const Floats power = (Floats)(((Words)shifted << 23) + 0x3f800000);
    return z < splat(-87.33f) ? Floats{} : mantissa * power;
}

template <typename Element> INLINE float block_maximum(const Element *x, int64_t count) {
    Floats top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int k = 0; k < 4; k++) top[k] = larger(load(x + i + k * LANES), top[k]);
    for (; i + LANES <= count; i += LANES) top[0] = larger(load(x + i), top[0]);
    if (i < count) top[1] = larger(load_some(x + i, count - i), top[1]);
    const Floats lanes = larger(larger(top[0], top[1]), larger(top[2], top[3]));
    float result = lanes[0];
    for (int lane = 1; lane < LANES; lane++) result = lanes[lane] > result ? lanes[lane] : result;
    return result;
}

struct Sums {
    Floats exponentials[4] = {}, moments[4] = {};
};

template <bool scaled, bool moment> INLINE void accumulate(Sums &sums, int k, Floats x, float largest, float temperature) {
    const Floats z = (scaled ? x / temperature : x) - largest;
    const Floats e = exponential(z);
    sums.exponentials[k] += e;
    if (moment) sums.moments[k] += e * larger(z, splat(-1e3f));  // 0 x -inf counts as 0
}

INLINE double total(const Floats (&parts)[4]) {
    const Floats lanes = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

template <typename Element, bool scaled, bool moment>
TARGET void row_statistics(const Element *row, int64_t columns, float temperature, float *out, int64_t out_stride) {
    float largest = -FLT_MAX;
    double d = 0, s = 0;
    for (int64_t start = 0; start < columns; start += BLOCK) {
        const Element *x = row + start;
        const int64_t count = columns - start < BLOCK ? columns - start : BLOCK;
        const float top = scaled ? block_maximum(x, count) / temperature : block_maximum(x, count);
        if (top > largest) {
            const double shift = (double)largest - top, scale = std::exp(shift);
            s = scale * (s + shift * d);
            d *= scale;
            largest = top;
        }
        Sums sums;
        int64_t i = 0;
        for (; i + 4 * LANES <= count; i += 4 * LANES)
            for (int k = 0; k < 4; k++) {
                const Element *here = x + i + k * LANES;
                __builtin_prefetch(here + BLOCK);  // the next block comes from memory while this one is computed
                accumulate<scaled, moment>(sums, k, load(here), largest, temperature);
            }
        for (; i + LANES <= count; i += LANES)
            accumulate<scaled, moment>(sums, 0, load(x + i), largest, temperature);
        if (i < count) accumulate<scaled, moment>(sums, 1, load_some(x + i, count - i), largest, temperature);
        d += total(sums.exponentials);
        if (moment) s += total(sums.moments);
    }
    out[0] = largest;
    out[out_stride] = (float)d;
    out[2 * out_stride] = moment ? (float)s : 0.0f;
}

template <typename Element, bool scaled, bool moment>
TARGET void statistics_of(const Statistics &job, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const Element *x = static_cast<const Element *>(job.logits) + row * job.logits_stride;
        float *out = job.out + row * job.out_step;
        row_statistics<Element, scaled, moment>(x, job.columns, job.temperature, out, job.out_stride);
        const int64_t y = job.targets[row] - job.first;
        const bool here = y >= 0 && y < job.columns;
        out[3 * job.out_stride] = here ? load_some(x + y, 1)[0] / job.temperature : 0.0f;
    }
}

template <typename Element> TARGET void statistics_in(const Statistics &job, int64_t begin, int64_t end) {
    const bool scaled = job.temperature != 1.0f;
    if (job.moment)
        (scaled ? statistics_of<Element, true, true> : statistics_of<Element, false, true>)(job, begin, end);
    else
        (scaled ? statistics_of<Element, true, false> : statistics_of<Element, false, false>)(job, begin, end);
}

TARGET void statistics_rows(const Statistics &job, int64_t begin, int64_t end) {
    (job.bfloat16 ? statistics_in<uint16_t> : statistics_in<float>)(job, begin, end);
}

struct Row {
    float g, g_entropy, lse, entropy, temperature;
};

template <bool scaled, bool with_entropy> INLINE Floats slope(Floats x, const Row &row) {
    const Floats log_p = (scaled ? x / row.temperature : x) - row.lse;
    const Floats p = exponential(log_p);
    if (!with_entropy) return p * -row.g;
    return p * -((larger(log_p, splat(-1e3f)) + row.entropy) * row.g_entropy + row.g);  // 0 x -inf counts as 0
}

template <typename Element, bool scaled, bool with_entropy>
TARGET void row_gradient(const Element *x, Element *dx, int64_t columns, int64_t y, const Row &row) {
    const bool here = y >= 0 && y < columns;
    const Floats target = here ? load_some(x + y, 1) : Floats{};  // before dx, which may be x, is written
    int64_t i = 0;
    for (; i + 2 * LANES <= columns; i += 2 * LANES)
        for (int k = 0; k < 2; k++)
            store(dx + i + k * LANES, slope<scaled, with_entropy>(load(x + i + k * LANES), row));
    for (; i + LANES <= columns; i += LANES) store(dx + i, slope<scaled, with_entropy>(load(x + i), row));
    if (i < columns) store_some(dx + i, slope<scaled, with_entropy>(load_some(x + i, columns - i), row), columns - i);
    if (here) store_some(dx + y, slope<scaled, with_entropy>(target, row) + row.g, 1);
}

template <typename Element, bool scaled, bool with_entropy>
TARGET void gradient_of(const Gradient &job, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
        const Element *x = static_cast<const Element *>(job.logits) + r * job.logits_stride;
        Element *dx = static_cast<Element *>(job.gradient) + r * job.gradient_stride;
        const float g = job.upstream[r], g_entropy = with_entropy ? job.upstream_entropy[r] : 0.0f;
        const bool idle = job.targets[r] == IGNORED || (g == 0 && g_entropy == 0);
        const int64_t written = idle ? 0 : job.columns;
        if (!idle) {
            const float t = job.temperature;
            const Row row = {g / t, g_entropy / t, job.lse[r], with_entropy ? job.entropies[r] : 0.0f, t};
            row_gradient<Element, scaled, with_entropy>(x, dx, job.columns, job.targets[r] - job.first, row);
        }
        memset(dx + written, 0, (job.width - written) * sizeof(Element));
    }
}

template <typename Element> TARGET void gradient_in(const Gradient &job, int64_t begin, int64_t end) {
    const bool scaled = job.temperature != 1.0f;
    if (job.upstream_entropy)
        (scaled ? gradient_of<Element, true, true> : gradient_of<Element, false, true>)(job, begin, end);
    else
        (scaled ? gradient_of<Element, true, false> : gradient_of<Element, false, false>)(job, begin, end);
}

TARGET void gradient_rows(const Gradient &job, int64_t begin, int64_t end) {
    (job.bfloat16 ? gradient_in<uint16_t> : gradient_in<float>)(job, begin, end);
}

}  // namespace VARIANT
}  // namespace

#undef INLINE
#undef VARIANT
#undef TARGET
#undef LANES
