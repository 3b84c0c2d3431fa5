// Vectors of floats, loops that are unrolled at compile time, and sums over lanes.
//
// Vectors are those of the compiler (GCC, Clang): one source serves AVX-512, AVX2, SSE and NEON.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32 vector registers
#else
constexpr bool MANY_REGISTERS = false;  // 16 vector registers
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef std::int32_t int_vec __attribute__((vector_size(LANES * 4)));

inline vec load(const float *from) { return *reinterpret_cast<const unaligned_vec *>(from); }
inline void store(float *to, vec value) { *reinterpret_cast<unaligned_vec *>(to) = value; }
inline vec broadcast(float value) { return value - vec{}; }
inline long round_up(long count, long unit = LANES) { return (count + unit - 1) / unit * unit; }

// Calls body with integral constants 0 .. N-1, unrolled: arrays indexed by them live in registers.
template <int... I, class Body>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
inline __attribute__((always_inline)) void unrolled(Body body) {
    unrolled(std::make_integer_sequence<int, N>{}, body);
}

inline double sum_lanes(vec values) {
    double sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += values[lane];
    return sum;
}

// A NaN stays a NaN.
inline vec apply_relu(vec value, bool relu) {
    return relu ? (value < 0 ? vec{} : value) : value;
}

// Group sizes that a kernel is compiled for, in descending order and down to 1: the compiler must
// know how many values a kernel holds in registers.
template <int... S>
struct Sizes {};
using GroupSizes = std::conditional_t<MANY_REGISTERS, Sizes<10, 8, 6, 4, 2, 1>,
                                      Sizes<5, 4, 3, 2, 1>>;  // of examples or of pixels

// Calls body(begin, size) with the largest size that is at most `most`, and returns that size.
template <int S, int... SMALLER, class Body>
inline long call_with_largest(Sizes<S, SMALLER...>, long most, long begin, Body body) {
    if constexpr (sizeof...(SMALLER) > 0) {
        if (S > most) return call_with_largest(Sizes<SMALLER...>{}, most, begin, body);
    }
    body(begin, std::integral_constant<int, S>{});
    return S;
}

template <int... S>
constexpr bool is_one_group(Sizes<S...>, long count) {
    return ((count == S) || ...);
}

// Splits `count` into groups of these sizes, as even as possible, and calls body(begin, size); the
// size is a compile-time constant.
template <int MOST, int... SMALLER, class Body>
inline void for_each_group(Sizes<MOST, SMALLER...> sizes, long count, Body body) {
    const long groups = (count + MOST - 1) / MOST;
    for (long begin = 0; begin < count;) {
        const long even = (count + groups - 1) / groups;
        begin += call_with_largest(sizes, std::min(even, count - begin), begin, body);
    }
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, int_vec{__VA_ARGS__})
#endif

template <int... I>
inline int_vec lane_indices(std::integer_sequence<int, I...>) {
    return int_vec{I...};
}

// Lanes 0, 2, 4, .. of two vectors, or with FROM 1 the lanes between them.
template <int FROM, int... I>
inline vec every_second(vec a, vec b, std::integer_sequence<int, I...>) {
    return SHUFFLED(a, b, (2 * I + FROM)...);
}

// Lanes with bit `D` clear: sums of pairs in `a`; with bit `D` set: sums of pairs in `b`. Applied
// for D = 1, 2, 4, .. it leaves sums of whole vectors.
template <int D, int... I>
inline vec pair_sums(vec a, vec b, std::integer_sequence<int, I...>) {
    return SHUFFLED(a, b, (I & D ? LANES + I : I)...) +
           SHUFFLED(a, b, (I & D ? LANES + I - D : I + D)...);
}

// Lane i holds the sum over the lanes of parts[i], i < N <= LANES; the other lanes are undefined.
template <int N, int D = 1>
inline vec lane_sums(const vec *parts) {
    if constexpr (D == LANES) {
        return parts[0];
    } else {
        vec halved[(N + 1) / 2];
        unrolled<(N + 1) / 2>([&](auto i) {
            constexpr int second = std::min(2 * i + 1, N - 1);
            constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
            halved[i] = pair_sums<D>(parts[2 * i], parts[second], lanes);
        });
        return lane_sums<(N + 1) / 2, 2 * D>(halved);
    }
}

// Writes the sum over the lanes of each of N parts.
template <int N>
inline void write_lane_sums(const vec *parts, float *to) {
    if constexpr (N <= LANES) {
        const vec sums = lane_sums<N>(parts);
        std::memcpy(to, &sums, N * sizeof(float));
    } else {
        write_lane_sums<LANES>(parts, to);
        write_lane_sums<N - LANES>(parts + LANES, to + LANES);
    }
}

}  // namespace
