// Trains one device: all steps of gradient descent on a chain of convolutions and linear layers, in one call and one thread.
//
// A device's weights, velocities and batch stay in the caches of one core. What makes it fast:
// - a linear layer holds a group of examples in registers and passes over its weights once per direction: the slope of a weight is
//   summed, enters the velocity and moves the weight without ever going to memory;
// - a convolution's backward pass visits only the pixels that its max-pool chose.
// Vectors are those of the compiler (GCC, Clang), so that one source serves AVX-512, AVX2, SSE and NEON.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

// What the caller hands over; on_cpu.py mirrors both structures. Weights and biases are trained in place, in torch's layout.
struct LayerSpec {
    std::int64_t is_conv, channels, height, width, outputs;
    std::int64_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
    std::int64_t relu, pool;
    float *weight, *bias;
    const float *weight_anchor, *bias_anchor;
    double weight_pull, bias_pull;
};

struct Job {
    const LayerSpec *layers;
    std::int64_t layer_count;
    const float *x;
    const std::int64_t *y;
    std::int64_t rows;
    const std::int64_t *order;
    std::int64_t steps, batch;
    double lr, momentum, weight_decay, pull_floor;
    double loss;
};

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32 of them
#else
constexpr bool MANY_REGISTERS = false;  // 16
#endif

constexpr int SPAN = MANY_REGISTERS ? 4 : 2;  // vectors of pixels that the kernel along pixels holds
constexpr long AHEAD = 32;                    // vectors of weights to fetch ahead
constexpr long CHUNK = 128;                   // of those whose slopes wait nearby if the batch has several groups

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef std::int32_t ints __attribute__((vector_size(LANES * 4)));

inline vec load(const float *from) { return *reinterpret_cast<const loose_vec *>(from); }
inline void store(float *to, vec value) { *reinterpret_cast<loose_vec *>(to) = value; }
inline vec spread(float value) { return value - vec{}; }
inline long padded(long count, long unit = LANES) { return (count + unit - 1) / unit * unit; }

// Calls body with integral constants 0 .. N-1, unrolled: arrays indexed by them live in registers.
template <int... I, class Body>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class Body>
inline __attribute__((always_inline)) void unrolled(Body body) {
    unrolled(std::make_integer_sequence<int, N>{}, body);
}

// Zeroed memory for one call, in few large pieces; every array has room for one vector more than asked.
class Arena {
public:
    ~Arena() {
        for (void *piece : pieces_) std::free(piece);
    }
    template <class T>
    T *take(long count) {
        static_assert(sizeof(T) == 4, "the room at the end is counted in floats");
        const std::size_t bytes = std::size_t(padded(count + LANES, 64 / 4)) * 4;
        if (bytes > left_) grow(bytes);
        T *taken = reinterpret_cast<T *>(next_);
        next_ += bytes, left_ -= bytes;
        return taken;
    }
    float *floats(long count) { return take<float>(count); }

private:
    static constexpr std::size_t HUGE_PAGE = std::size_t(1) << 21;

    void grow(std::size_t bytes) {
        const std::size_t size = std::max(bytes, 2 * HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE + HUGE_PAGE;
        pieces_.reserve(pieces_.size() + 1);
        char *piece = static_cast<char *>(std::calloc(size + HUGE_PAGE, 1));
        if (!piece) throw std::bad_alloc();
        pieces_.push_back(piece);
        next_ = reinterpret_cast<char *>((reinterpret_cast<std::uintptr_t>(piece) + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
        left_ = size;
#ifdef __linux__
        madvise(next_, size, MADV_HUGEPAGE);  // thousands of page faults less per call; a refusal does no harm
#endif
    }

    std::vector<void *> pieces_;
    char *next_ = nullptr;
    std::size_t left_ = 0;
};

// The rule of stochastic gradient descent.
struct Rule {
    float lr, momentum, decay;
};

// A tensor in a kernel's own layout, with its velocity, and what pulls it.
struct Moving {
    float *weight = nullptr, *velocity = nullptr, *anchor = nullptr;  // velocity: only with momentum; anchor: only if pulled
    float pull = 0;

    Moving() = default;
    Moving(Arena &arena, long count, const Rule &rule, bool pulled, double strength) : pull(float(strength)) {
        weight = arena.floats(count);
        if (rule.momentum != 0) velocity = arena.floats(count);
        if (pulled) anchor = arena.floats(count);
    }
};

// What pushes one vector of weights besides its slope: decay, pull and momentum. Adds its squared distance from its anchor.
inline __attribute__((always_inline)) vec push_on(const Moving &tensor, long at, vec weight, const Rule &rule, vec &distance) {
    vec push = rule.decay * weight;
    if (tensor.anchor) {
        const vec away = weight - load(tensor.anchor + at);
        push += tensor.pull * away;
        distance += away * away;
    }
    if (tensor.velocity) push += rule.momentum * load(tensor.velocity + at);
    return push;
}

// Moves one vector of weights, given slope and push together, and returns it.
inline __attribute__((always_inline)) vec move(const Moving &tensor, long at, vec weight, vec velocity, const Rule &rule) {
    if (tensor.velocity) store(tensor.velocity + at, velocity);
    const vec moved = weight - rule.lr * velocity;
    store(tensor.weight + at, moved);
    return moved;
}

// Asks for weights that will move soon: a core waits for its outer cache longer than it computes.
inline __attribute__((always_inline)) void fetch_ahead(const Moving &tensor, long at) {
    __builtin_prefetch(tensor.weight + at + AHEAD * LANES, 1);
    if (tensor.velocity) __builtin_prefetch(tensor.velocity + at + AHEAD * LANES, 1);
}

inline double sum_of(vec values) {
    double sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += values[lane];
    return sum;
}

// Moves a whole tensor; returns the value of its pull.
double move_all(const Moving &tensor, const float *slope, long count, const Rule &rule) {
    vec distance{};
    for (long at = 0; at < count; at += LANES) {
        const vec weight = load(tensor.weight + at);
        move(tensor, at, weight, load(slope + at) + push_on(tensor, at, weight, rule, distance), rule);
    }
    return tensor.pull / 2 * sum_of(distance);
}

// Sizes that a kernel is compiled for, in descending order and down to 1: what it holds in registers must be known beforehand.
template <int... S>
struct Sizes {};
using Groups = std::conditional_t<MANY_REGISTERS, Sizes<10, 8, 6, 4, 2, 1>, Sizes<5, 4, 3, 2, 1>>;  // of examples, or of pixels

template <int S, int... SMALLER, class Body>
inline long first_piece(Sizes<S, SMALLER...>, long most, long begin, Body body) {
    if constexpr (sizeof...(SMALLER) > 0) {
        if (S > most) return first_piece(Sizes<SMALLER...>{}, most, begin, body);
    }
    body(begin, std::integral_constant<int, S>{});
    return S;
}

template <int... S>
constexpr bool is_one_piece(Sizes<S...>, long count) {
    return ((count == S) || ...);
}

// Splits `count` into pieces of such sizes, as even as can be, and calls body(begin, size), the size a constant.
template <int MOST, int... SMALLER, class Body>
inline void in_pieces(Sizes<MOST, SMALLER...> sizes, long count, Body body) {
    const long pieces = (count + MOST - 1) / MOST;
    for (long begin = 0; begin < count;) {
        const long even = (count + pieces - 1) / pieces;
        begin += first_piece(sizes, std::min(even, count - begin), begin, body);
    }
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, ints{__VA_ARGS__})
#endif

template <int... I>
inline ints count_up(std::integer_sequence<int, I...>) {
    return ints{I...};
}

// Lanes with bit `D` clear: sums of pairs in `a`; with it set: in `b`. Applied for D = 1, 2, 4, .. it leaves sums of whole vectors.
template <int D, int... I>
inline vec paired(vec a, vec b, std::integer_sequence<int, I...>) {
    return SHUFFLED(a, b, (I & D ? LANES + I : I)...) + SHUFFLED(a, b, (I & D ? LANES + I - D : I + D)...);
}

// Lane i holds the sum over the lanes of parts[i], i < N <= LANES; the other lanes hold anything.
template <int N, int D = 1>
inline vec totals(const vec *parts) {
    if constexpr (D == LANES) {
        return parts[0];
    } else {
        vec halved[(N + 1) / 2];
        unrolled<(N + 1) / 2>([&](auto i) {
            constexpr int second = std::min(2 * i + 1, N - 1);
            halved[i] = paired<D>(parts[2 * i], parts[second], std::make_integer_sequence<int, LANES>{});
        });
        return totals<(N + 1) / 2, 2 * D>(halved);
    }
}

// Writes the sum over the lanes of each of N parts.
template <int N>
inline void write_totals(const vec *parts, float *to) {
    if constexpr (N <= LANES) {
        const vec sums = totals<N>(parts);
        std::memcpy(to, &sums, N * sizeof(float));
    } else {
        write_totals<LANES>(parts, to);
        write_totals<N - LANES>(parts + LANES, to + LANES);
    }
}

// The numbers of a batch in panels of neighbouring columns (panels, examples, width): what a kernel reads at once lies together.
struct Sheet {
    float *data = nullptr;
    long width = 1, examples = 0;

    float *at(long column, long example) const { return data + (column / width * examples + example) * width + column % width; }
};

// Copies a row of numbers to its place in a sheet.
void pour(const float *row, long count, const Sheet &sheet, long example) {
    for (long column = 0; column < count; column += sheet.width) {
        std::memcpy(sheet.at(column, example), row + column, std::min(sheet.width, count - column) * sizeof(float));
    }
}

// What all linear layers have in common; weights lie in panels of LANES neighbouring inputs, or of outputs in an Entry.
struct Linear {
    long inputs, outputs, batch;
    bool relu, has_bias;
    Moving weight, bias;
    float *waiting;   // slopes of a chunk of weights, summed over the groups of examples seen so far
    Sheet slope_out;  // slope of what left

    Linear(Arena &arena, const LayerSpec &spec, const Rule &rule, long batch_size, long weights)
        : inputs(spec.channels * spec.height * spec.width),
          outputs(spec.outputs),
          batch(batch_size),
          relu(spec.relu),
          has_bias(spec.bias),
          weight(arena, weights, rule, spec.weight_anchor, spec.weight_pull),
          bias(arena, outputs, rule, spec.bias_anchor, spec.bias_pull),
          waiting(arena.floats(CHUNK * LANES)) {}
};

// Which weights a backward kernel visits: [begin, end) of a panel, for a group of examples; the batch's last group moves them.
struct Tile {
    long panel, begin, end, example;
    bool opens, closes;  // whether the group is the batch's first, and its last
};

// Visits all tiles of a layer; several groups share a chunk of weights while it is near.
template <class Visit>
void for_each_tile(long panels, long count, long examples, Visit visit) {
    const long chunk = is_one_piece(Groups{}, examples) ? count : CHUNK;
    for (long panel = 0; panel < panels; ++panel) {
        for (long begin = 0; begin < count; begin += chunk) {
            in_pieces(Groups{}, examples, [&](long example, auto n) {
                const long end = std::min(begin + chunk, count);
                visit(n, Tile{panel, begin, end, example, example == 0, example + n == examples});
            });
        }
    }
}

inline vec through_relu(vec value, bool relu) { return relu ? (value < 0 ? vec{} : value) : value; }  // a NaN passes

// A linear layer at the head of the chain: its input does not move, and is known before the step begins. So one pass over its
// weights, panel by panel of outputs (panels, inputs, LANES), moves them and computes what leaves in the next step.
struct Entry : Linear {
    long panels;
    float *input, *next_input;  // (inputs, batch)

    Entry(Arena &arena, const LayerSpec &spec, const Rule &rule, long batch_size)
        : Linear(arena, spec, rule, batch_size, padded(spec.outputs) * spec.channels * spec.height * spec.width),
          panels(padded(outputs) / LANES),
          input(arena.floats(inputs * batch)),
          next_input(arena.floats(inputs * batch)) {
        slope_out = {arena.floats(padded(outputs) * batch), LANES, batch};
    }
};

template <int N>
void forward_group(const Entry &layer, long example, const Sheet &to) {
    for (long panel = 0; panel < layer.panels; ++panel) {
        const float *w = layer.weight.weight + panel * layer.inputs * LANES, *x = layer.input + example;
        vec sums[N];
        unrolled<N>([&](auto n) { sums[n] = load(layer.bias.weight + panel * LANES); });
        for (long i = 0; i < layer.inputs; ++i, w += LANES, x += layer.batch) {
            const vec weight = load(w);
            unrolled<N>([&](auto n) { sums[n] += x[n] * weight; });
        }
        unrolled<N>([&](auto n) { store(to.at(panel * LANES, example + n), through_relu(sums[n], layer.relu)); });
    }
}

void forward(const Entry &layer, long examples, const Sheet &to) {
    in_pieces(Groups{}, examples, [&](long example, auto n) { forward_group<n>(layer, example, to); });
}

// Moves the weights of a tile. If `next` is given the tile is a whole panel, and what leaves it in the next step goes there.
template <int N, bool NEXT>
vec move_tile(const Entry &layer, const Tile &tile, const Rule &given, const Sheet &next) {
    const Rule rule = given;  // copies: else a store might change them, and they would be loaded again and again
    const Moving tensor = layer.weight;
    const long batch = layer.batch, from = (tile.panel * layer.inputs + tile.begin) * LANES;
    const long count = (tile.end - tile.begin) * LANES;
    const float *x = layer.input + tile.begin * batch + tile.example, *next_x = layer.next_input;
    float *waiting = layer.waiting;
    const bool opens = tile.opens, closes = tile.closes;
    vec slope_out[N], sums[N], distance{};
    unrolled<N>([&](auto n) { slope_out[n] = load(layer.slope_out.at(tile.panel * LANES, tile.example + n)); });
    unrolled<N>([&](auto n) { sums[n] = load(layer.bias.weight + tile.panel * LANES); });
    for (long at = from; at < from + count; at += LANES, x += batch, next_x += batch, waiting += LANES) {
        fetch_ahead(tensor, at);
        const vec weight = load(tensor.weight + at);
        // two sums, and the push first: one after the other, additions would wait for each other
        vec slope[2] = {opens ? vec{} : load(waiting), closes ? push_on(tensor, at, weight, rule, distance) : vec{}};
        unrolled<N>([&](auto n) { slope[n % 2] += x[n] * slope_out[n]; });
        if (!closes) {
            store(waiting, slope[0] + slope[1]);
            continue;
        }
        const vec moved = move(tensor, at, weight, slope[0] + slope[1], rule);
        if constexpr (NEXT) unrolled<N>([&](auto n) { sums[n] += next_x[n] * moved; });
    }
    if constexpr (NEXT) unrolled<N>([&](auto n) { store(next.at(tile.panel * LANES, n), through_relu(sums[n], layer.relu)); });
    return distance;
}

double move_bias(const Entry &layer, long examples, const Rule &rule) {
    if (!layer.has_bias) return 0;
    vec distance{};
    for (long panel = 0; panel < layer.panels; ++panel) {
        vec slope{};
        for (long n = 0; n < examples; ++n) slope += load(layer.slope_out.at(panel * LANES, n));
        const vec weight = load(layer.bias.weight + panel * LANES);
        move(layer.bias, panel * LANES, weight, slope + push_on(layer.bias, panel * LANES, weight, rule, distance), rule);
    }
    return layer.bias.pull / 2 * sum_of(distance);
}

// Moves the weights; returns the value of the pulls on them. If `next` is not empty, fills it with what leaves in the next step,
// which must have as many examples as this one, all in one group.
double backward(const Entry &layer, long examples, const Rule &rule, const Sheet &next) {
    const double pulled = move_bias(layer, examples, rule);
    double distance = 0;
    for_each_tile(layer.panels, layer.inputs, examples, [&](auto n, const Tile &tile) {
        distance += sum_of(next.data ? move_tile<n, true>(layer, tile, rule, next) : move_tile<n, false>(layer, tile, rule, next));
    });
    return pulled + layer.weight.pull / 2 * distance;
}

// A linear layer further down, its weights in panels of inputs (panels, outputs, LANES).
struct Dense : Linear {
    long panels;
    Sheet input, slope_in;  // what entered, and its slope
    float *bias_slope;

    Dense(Arena &arena, const LayerSpec &spec, const Rule &rule, long batch_size)
        : Linear(arena, spec, rule, batch_size, padded(spec.channels * spec.height * spec.width) * spec.outputs),
          panels(padded(inputs) / LANES),
          input{arena.floats(padded(inputs) * batch), LANES, batch},
          slope_in{arena.floats(padded(inputs) * batch), LANES, batch},
          bias_slope(arena.floats(outputs)) {
        slope_out = {arena.floats(outputs * batch), 1, batch};
    }
};

// Products of M outputs' weights with N examples, without the bias: to[m * N + n].
template <int N, int M>
inline void products(const Dense &layer, long example, long output, float *to) {
    vec sums[M * N] = {};
    const float *x = layer.input.data + example * LANES, *w = layer.weight.weight + output * LANES;
    for (long panel = 0; panel < layer.panels; ++panel, x += layer.batch * LANES, w += layer.outputs * LANES) {
        vec weights[M];
        unrolled<M>([&](auto m) { weights[m] = load(w + m * LANES); });
        unrolled<N>([&](auto n) {
            const vec value = load(x + n * LANES);
            unrolled<M>([&](auto m) { sums[m * N + n] += weights[m] * value; });
        });
    }
    unrolled<M>([&](auto m) { write_totals<N>(sums + m * N, to + m * N); });
}

// Adds the bias, applies the ReLU, and puts N examples of one output in their place.
template <int N>
inline void emit(const Dense &layer, const float *sums, const Sheet &to, long example, long output) {
    float *place = to.at(output, example);
    const float bias = layer.bias.weight[output];
    for (long n = 0; n < N; ++n) {
        const float value = sums[n] + bias;
        place[n * to.width] = layer.relu && value < 0 ? 0 : value;
    }
}

template <int N>
void forward_group(const Dense &layer, long example, const Sheet &to) {
    float sums[2 * N];
    long output = 0;
    for (; output + 2 <= layer.outputs; output += 2) {
        products<N, 2>(layer, example, output, sums);
        emit<N>(layer, sums, to, example, output);
        emit<N>(layer, sums + N, to, example, output + 1);
    }
    if (output < layer.outputs) {
        products<N, 1>(layer, example, output, sums);
        emit<N>(layer, sums, to, example, output);
    }
}

void forward(const Dense &layer, long examples, const Sheet &to) {
    in_pieces(Groups{}, examples, [&](long example, auto n) { forward_group<n>(layer, example, to); });
}

// Slopes of a tile's weights and of what entered; the weights move once their slope is whole.
template <int N>
vec backward_tile(const Dense &layer, const Tile &tile, const Rule &given) {
    const Rule rule = given;  // copies, as in move_tile
    const Moving tensor = layer.weight;
    const long batch = layer.batch, entry = (tile.panel * batch + tile.example) * LANES;
    const long from = (tile.panel * layer.outputs + tile.begin) * LANES, count = (tile.end - tile.begin) * LANES;
    const float *slope_out = layer.slope_out.at(tile.begin, tile.example);
    float *waiting = layer.waiting;
    const bool opens = tile.opens, closes = tile.closes;
    vec x[N], slope_in[N], distance{};
    unrolled<N>([&](auto n) { x[n] = load(layer.input.data + entry + n * LANES); });
    unrolled<N>([&](auto n) { slope_in[n] = load(layer.slope_in.data + entry + n * LANES); });
    for (long at = from; at < from + count; at += LANES, slope_out += batch, waiting += LANES) {
        fetch_ahead(tensor, at);
        const vec weight = load(tensor.weight + at);
        vec slope[2] = {opens ? vec{} : load(waiting), closes ? push_on(tensor, at, weight, rule, distance) : vec{}};
        unrolled<N>([&](auto n) {
            const vec s = spread(slope_out[n]);
            slope[n % 2] += s * x[n];
            slope_in[n] += s * weight;
        });
        if (closes) {
            move(tensor, at, weight, slope[0] + slope[1], rule);
        } else {
            store(waiting, slope[0] + slope[1]);
        }
    }
    unrolled<N>([&](auto n) { store(layer.slope_in.data + entry + n * LANES, slope_in[n]); });
    return distance;
}

double move_bias(const Dense &layer, long examples, const Rule &rule) {
    if (!layer.has_bias) return 0;
    for (long output = 0; output < layer.outputs; ++output) {
        const float *slope = layer.slope_out.at(output, 0);
        layer.bias_slope[output] = std::accumulate(slope, slope + examples, 0.0f);
    }
    return move_all(layer.bias, layer.bias_slope, layer.outputs, rule);
}

// Moves the weights, given slope_out, and fills slope_in; returns the value of the pulls on them.
double backward(const Dense &layer, long examples, const Rule &rule) {
    std::fill_n(layer.slope_in.data, layer.panels * LANES * layer.batch, 0.0f);
    double distance = 0;
    for_each_tile(layer.panels, layer.outputs, examples,
                  [&](auto n, const Tile &tile) { distance += sum_of(backward_tile<n>(layer, tile, rule)); });
    return layer.weight.pull / 2 * distance + move_bias(layer, examples, rule);
}

// slope, or nothing where the ReLU let nothing through.
inline float behind_relu(float slope, float value, bool relu) { return relu && !(value > 0) ? 0 : slope; }

void behind_relu(const float *slope, const float *value, bool relu, long count, float *to) {
    for (long i = 0; i < count; ++i) to[i] = behind_relu(slope[i], value[i], relu);
}

// Hands the slope of what entered a layer to the one before, behind its ReLU.
void pass_back(const Dense &layer, const Entry &before) {
    behind_relu(layer.slope_in.data, layer.input.data, before.relu, layer.panels * LANES * layer.batch, before.slope_out.data);
}

void pass_back(const Dense &layer, const Dense &before, long examples) {
    for (long column = 0; column < before.outputs; ++column) {
        const float *slope = layer.slope_in.at(column, 0), *value = layer.input.at(column, 0);
        float *to = before.slope_out.at(column, 0);
        for (long n = 0; n < examples; ++n) to[n] = behind_relu(slope[n * LANES], value[n * LANES], before.relu);
    }
}

// A convolution with its ReLU and max-pool. Images are (height, width, channels), so that a row of a filter is one run of numbers.
struct Conv {
    long channels, height, width, outputs, kernel_height, kernel_width, stride_height, pad_height, pad_width, pool;
    bool relu, first, has_bias;
    long framed_height, framed_width;       // with the padding
    long row;                               // numbers in a framed row
    long run, run_padded, filter;           // numbers in a filter's row, in whole vectors, and in a filter of such rows
    long whole_height, whole_width;         // outputs before the pool, without those that no window covers
    long pooled_width, places;              // after the pool
    bool along_pixels;                      // forward in vectors of pixels instead of channels
    long plane;                             // numbers in a plane of outputs before the pool, if along pixels
    std::vector<std::int32_t> begins;       // where in the framed image the patch of each whole output begins
    std::vector<std::int32_t> pixel_of;     // the reverse
    std::vector<std::int32_t> taps;         // where the numbers of a filter lie in framed planes
    Moving weight, bias;                    // weight: (outputs, filter)
    float *slope, *bias_slope, *forward_weight;
    float *output, *slope_out;              // what left (batch, places, outputs), and its slope, through the ReLU
    std::int32_t *chosen;                   // where in the framed image the patch begins that the pool chose, for all of `output`
    long chosen_by_place, chosen_by_output;
    float *frame, *planes, *maps;           // one image: framed, its planes, and the outputs before the pool
    float *pooled_row;
    float *slope_frame, *entry_slope;       // one image: slope of what entered, and of each whole output that was chosen
    std::int32_t *entry_output, *entries;

    Conv(Arena &arena, const LayerSpec &spec, const Rule &rule, long batch, bool is_first);

    long numbers_in() const { return channels * height * width; }
    long numbers_out() const { return places * outputs; }

private:
    void find_sizes(const LayerSpec &spec);
    void find_places(const LayerSpec &spec);
};

void Conv::find_sizes(const LayerSpec &spec) {
    framed_height = height + 2 * pad_height, framed_width = width + 2 * pad_width;
    row = framed_width * channels;
    run = kernel_width * channels, run_padded = padded(run), filter = kernel_height * run_padded;
    const long pooled_height = ((framed_height - kernel_height) / spec.stride_height + 1) / pool;
    pooled_width = ((framed_width - kernel_width) / spec.stride_width + 1) / pool;
    places = pooled_height * pooled_width;
    whole_height = pooled_height * pool, whole_width = pooled_width * pool;
    plane = padded((whole_height - 1) * framed_width + whole_width);
    // lanes that do nothing: channels beyond the last, or pixels beyond the end of a row
    const bool dense = spec.stride_height == 1 && spec.stride_width == 1;
    along_pixels = dense && outputs * plane < padded(outputs) * whole_height * whole_width;
}

void Conv::find_places(const LayerSpec &spec) {
    pixel_of.resize(framed_height * row);
    for (long y = 0; y < whole_height; ++y) {
        for (long x = 0; x < whole_width; ++x) {
            const long begin = y * spec.stride_height * row + x * spec.stride_width * channels;
            pixel_of[begin] = std::int32_t(begins.size());
            begins.push_back(std::int32_t(begin));
        }
    }
    for (long y = 0; y < kernel_height; ++y) {
        for (long x = 0; x < kernel_width; ++x) {
            for (long c = 0; c < channels; ++c) taps.push_back(std::int32_t((c * framed_height + y) * framed_width + x));
        }
    }
}

Conv::Conv(Arena &arena, const LayerSpec &spec, const Rule &rule, long batch, bool is_first)
    : channels(spec.channels),
      height(spec.height),
      width(spec.width),
      outputs(spec.outputs),
      kernel_height(spec.kernel_height),
      kernel_width(spec.kernel_width),
      stride_height(spec.stride_height),
      pad_height(spec.pad_height),
      pad_width(spec.pad_width),
      pool(spec.pool),
      relu(spec.relu),
      first(is_first),
      has_bias(spec.bias) {
    find_sizes(spec);
    find_places(spec);
    const long whole = whole_height * whole_width, framed = framed_height * row;
    weight = Moving(arena, outputs * filter, rule, spec.weight_anchor, spec.weight_pull);
    bias = Moving(arena, outputs, rule, spec.bias_anchor, spec.bias_pull);
    slope = arena.floats(outputs * filter), bias_slope = arena.floats(outputs);
    forward_weight = arena.floats(padded(outputs) * kernel_height * run);
    output = arena.floats(batch * numbers_out()), slope_out = arena.floats(batch * numbers_out());
    chosen_by_place = along_pixels ? 1 : padded(outputs), chosen_by_output = along_pixels ? places : 1;
    chosen = arena.take<std::int32_t>(batch * places * padded(outputs));
    frame = arena.floats(framed), planes = arena.floats(framed);
    maps = arena.floats((along_pixels ? outputs * plane : padded(outputs) * whole) + LANES);
    pooled_row = arena.floats(pooled_width);
    slope_frame = arena.floats(framed);
    entry_slope = arena.floats(whole * outputs);
    entry_output = arena.take<std::int32_t>(whole * outputs), entries = arena.take<std::int32_t>(whole);
}

// An image wherever it lies: number (c, y, x) is at c * by_channel + y * by_row + x * by_column.
struct Image {
    const float *data;
    long by_channel, by_row, by_column;
};

// One row of an image from planes to pixels.
void interleave(const Conv &conv, const float *from, long by_channel, float *to) {
    if (conv.channels == 3) {  // colours: a loop that compilers turn into vectors
        const float *red = from, *green = from + by_channel, *blue = green + by_channel;
        for (long x = 0; x < conv.width; ++x) to[3 * x] = red[x], to[3 * x + 1] = green[x], to[3 * x + 2] = blue[x];
        return;
    }
    for (long c = 0; c < conv.channels; ++c) {
        for (long x = 0; x < conv.width; ++x) to[x * conv.channels + c] = from[c * by_channel + x];
    }
}

// The image with its padding around it, channels innermost; in place if it lies so already.
const float *framed(const Conv &conv, const Image &image) {
    const bool in_order = image.by_channel == 1 || conv.channels == 1;
    if (in_order && conv.pad_height == 0 && conv.pad_width == 0 && !conv.first) return image.data;
    for (long y = 0; y < conv.height; ++y) {
        float *to = conv.frame + (y + conv.pad_height) * conv.row + conv.pad_width * conv.channels;
        const float *from = image.data + y * image.by_row;
        if (in_order) {
            std::memcpy(to, from, conv.width * conv.channels * sizeof(float));
            continue;
        }
        interleave(conv, from, image.by_channel, to);
    }
    return conv.frame;
}

// The image with its padding around it, plane by plane.
const float *framed_planes(const Conv &conv, const Image &image) {
    for (long c = 0; c < conv.channels; ++c) {
        for (long y = 0; y < conv.height; ++y) {
            float *to = conv.planes + (c * conv.framed_height + y + conv.pad_height) * conv.framed_width + conv.pad_width;
            const float *from = image.data + c * image.by_channel + y * image.by_row;
            if (image.by_column == 1) {
                std::memcpy(to, from, conv.width * sizeof(float));
                continue;
            }
            for (long x = 0; x < conv.width; ++x) to[x] = from[x * image.by_column];
        }
    }
    return conv.planes;
}

// Whole outputs of P pixels and V vectors of channels, beginning at output `o`.
template <int P, int V>
void channels_of_pixels(const Conv &conv, const float *frame, long pixel, long o) {
    vec sums[P * V];
    const float *patch[P];
    unrolled<P>([&](auto p) { patch[p] = frame + conv.begins[pixel + p]; });
    unrolled<P * V>([&](auto i) { sums[i] = load(conv.bias.weight + o + i % V * LANES); });
    const long block = conv.kernel_height * conv.run * LANES;
    const float *w = conv.forward_weight + o / LANES * block;
    for (long y = 0; y < conv.kernel_height; ++y) {
        for (long k = 0; k < conv.run; ++k, w += LANES) {
            vec weights[V];
            unrolled<V>([&](auto v) { weights[v] = load(w + v * block); });
            unrolled<P>([&](auto p) {
                const vec value = spread(patch[p][k]);
                unrolled<V>([&](auto v) { sums[p * V + v] += value * weights[v]; });
            });
        }
        unrolled<P>([&](auto p) { patch[p] += conv.row; });
    }
    float *to = conv.maps + pixel * padded(conv.outputs) + o;
    unrolled<P>([&](auto p) { unrolled<V>([&](auto v) { store(to + p * padded(conv.outputs) + v * LANES, sums[p * V + v]); }); });
}

// Whole outputs of M channels and S vectors of pixels; a row of pixels is as wide as the framed image, its end is not used.
template <int M, int S>
void pixels_of_channels(const Conv &conv, const float *planes, long pixel, long o) {
    vec sums[M * S];
    unrolled<M * S>([&](auto i) { sums[i] = spread(conv.bias.weight[o + i / S]); });
    const float *w = conv.forward_weight + o;
    for (const std::int32_t tap : conv.taps) {
        vec values[S];
        unrolled<S>([&](auto s) { values[s] = load(planes + tap + pixel + s * LANES); });
        unrolled<M>([&](auto m) {
            const vec weight = spread(w[m]);
            unrolled<S>([&](auto s) { sums[m * S + s] += weight * values[s]; });
        });
        w += conv.outputs;
    }
    unrolled<M * S>([&](auto i) { store(conv.maps + (o + i / S) * conv.plane + pixel + i % S * LANES, sums[i]); });
}

void convolve_along_channels(const Conv &conv, const float *frame) {
    in_pieces(Sizes<2, 1>{}, padded(conv.outputs) / LANES, [&](long vector, auto v) {
        in_pieces(Groups{}, long(conv.begins.size()),
                  [&](long pixel, auto p) { channels_of_pixels<p, decltype(v)::value>(conv, frame, pixel, vector * LANES); });
    });
}

void convolve_along_pixels(const Conv &conv, const float *planes) {
    in_pieces(Sizes<SPAN, 1>{}, conv.plane / LANES, [&](long vector, auto s) {
        in_pieces(Sizes<6, 4, 2, 1>{}, conv.outputs,
                  [&](long o, auto m) { pixels_of_channels<m, decltype(s)::value>(conv, planes, vector * LANES, o); });
    });
}

// Keeps the greater of two numbers and where it was; the first of equals, and a NaN above all, as torch does.
template <class Value, class Where>
inline void keep_greater(Value &best, Where &at, Value value, Where where) {
    const auto greater = (value > best) | (value != value);
    best = greater ? value : best;
    at = greater ? where : at;
}

// The greatest of each pool window, and where its patch begins; vectors of channels.
void pool_channels(const Conv &conv, float *output, std::int32_t *chosen) {
    const long stride = padded(conv.outputs);
    for (long place = 0; place < conv.places; ++place) {
        const long corner = place / conv.pooled_width * conv.pool * conv.whole_width + place % conv.pooled_width * conv.pool;
        for (long o = 0; o < conv.outputs; o += LANES) {
            vec best = load(conv.maps + corner * stride + o);
            ints at = conv.begins[corner] - ints{};
            for (long i = 1; i < conv.pool * conv.pool; ++i) {
                const long pixel = corner + i / conv.pool * conv.whole_width + i % conv.pool;
                keep_greater(best, at, load(conv.maps + pixel * stride + o), conv.begins[pixel] - ints{});
            }
            best = through_relu(best, conv.relu);
            std::memcpy(output + place * conv.outputs + o, &best, std::min<long>(LANES, conv.outputs - o) * sizeof(float));
            std::memcpy(chosen + place * stride + o, &at, sizeof(at));
        }
    }
}

// Lanes 0, 2, 4, .. of two vectors, or with FROM 1 the lanes between them.
template <int FROM, int... I>
inline vec every_second(vec a, vec b, std::integer_sequence<int, I...>) {
    return SHUFFLED(a, b, (2 * I + FROM)...);
}

// A row of windows of side 2 in one plane: the greatest of each, and where its patch begins. May write one vector too far.
void pool_row_by_two(const Conv &conv, const float *map, std::int32_t begin, float *best, std::int32_t *chosen) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
    const std::int32_t right = std::int32_t(conv.channels), down = std::int32_t(conv.row);
    ints start = begin + 2 * right * count_up(lanes);
    for (long i = 0; i < conv.pooled_width; i += LANES, start += 2 * right * LANES) {
        const float *above = map + 2 * i, *below = above + conv.framed_width;
        const vec a = load(above), b = load(above + LANES), c = load(below), d = load(below + LANES);
        vec greatest = every_second<0>(a, b, lanes);
        ints at = start;
        keep_greater(greatest, at, every_second<1>(a, b, lanes), start + right);
        keep_greater(greatest, at, every_second<0>(c, d, lanes), start + down);
        keep_greater(greatest, at, every_second<1>(c, d, lanes), start + down + right);
        store(best + i, through_relu(greatest, conv.relu));
        std::memcpy(chosen + i, &at, sizeof(at));
    }
}

// The same for windows of any side.
void pool_row(const Conv &conv, const float *map, std::int32_t begin, float *best, std::int32_t *chosen) {
    const std::int32_t right = std::int32_t(conv.channels), down = std::int32_t(conv.row);
    for (long i = 0; i < conv.pooled_width; ++i) {
        const float *corner = map + i * conv.pool;
        const std::int32_t start = begin + std::int32_t(i * conv.pool) * right;
        float greatest = *corner;
        std::int32_t at = start;
        for (int y = 0; y < conv.pool; ++y) {
            for (int x = 0; x < conv.pool; ++x) {
                keep_greater(greatest, at, corner[y * conv.framed_width + x], start + y * down + x * right);
            }
        }
        best[i] = conv.relu && greatest < 0 ? 0 : greatest;
        chosen[i] = at;
    }
}

void pool_pixels(const Conv &conv, float *output, std::int32_t *chosen) {
    const auto pool = conv.pool == 2 ? pool_row_by_two : pool_row;
    float *best = conv.pooled_row;
    for (long o = 0; o < conv.outputs; ++o) {
        for (long place = 0; place < conv.places; place += conv.pooled_width) {
            const long y = place / conv.pooled_width * conv.pool;
            const float *map = conv.maps + o * conv.plane + y * conv.framed_width;
            pool(conv, map, std::int32_t(y * conv.row), best, chosen + o * conv.places + place);
            for (long i = 0; i < conv.pooled_width; ++i) output[(place + i) * conv.outputs + o] = best[i];
        }
    }
}

void forward(const Conv &conv, const Image &image, long example) {
    float *output = conv.output + example * conv.numbers_out();
    std::int32_t *chosen = conv.chosen + example * conv.places * padded(conv.outputs);
    if (conv.along_pixels) {
        convolve_along_pixels(conv, framed_planes(conv, image));
        pool_pixels(conv, output, chosen);
    } else {
        convolve_along_channels(conv, framed(conv, image));
        pool_channels(conv, output, chosen);
    }
}

// Calls body(R, V, y, k) for pieces of a filter that fit into registers: R rows from y on, V vectors from number k on.
template <class Body>
void in_taps(const Conv &conv, Body body) {
    in_pieces(Sizes<3, 2, 1>{}, conv.run_padded / LANES, [&](long vector, auto v) {
        using Heights = std::conditional_t<v == 3 || !MANY_REGISTERS, Sizes<3, 1>, Sizes<5, 3, 1>>;
        in_pieces(Heights{}, conv.kernel_height, [&](long y, auto r) { body(r, v, y, vector * LANES); });
    });
}

// Adds one image's slopes of a piece of filter `o`; returns the slope of its bias.
template <int R, int V>
float filter_slopes(const Conv &conv, const float *frame, const float *slope_out, const std::int32_t *chosen, float *slope) {
    vec sums[R * V];
    float total = 0;
    unrolled<R * V>([&](auto i) { sums[i] = load(slope + i / V * conv.run_padded + i % V * LANES); });
    for (long place = 0; place < conv.places; ++place) {
        const float number = slope_out[place * conv.outputs];
        const float *patch = frame + chosen[place * conv.chosen_by_place];
        total += number;
        unrolled<R>([&](auto r) {
            unrolled<V>([&](auto v) { sums[r * V + v] += spread(number) * load(patch + v * LANES); });
            patch += conv.row;
        });
    }
    unrolled<R * V>([&](auto i) { store(slope + i / V * conv.run_padded + i % V * LANES, sums[i]); });
    return total;
}

void add_filter_slopes(const Conv &conv, const float *frame, const float *slope_out, const std::int32_t *chosen) {
    in_taps(conv, [&](auto r, auto v, long y, long k) {
        for (long o = 0; o < conv.outputs; ++o) {
            float *slope = conv.slope + o * conv.filter + y * conv.run_padded + k;
            const float total =
                filter_slopes<r, v>(conv, frame + y * conv.row + k, slope_out + o, chosen + o * conv.chosen_by_output, slope);
            if (y == 0 && k == 0) conv.bias_slope[o] += total;
        }
    });
}

// Sorts an image's slopes by the whole output that the pool chose.
void collect_entries(const Conv &conv, const float *slope_out, const std::int32_t *chosen) {
    std::fill_n(conv.entries, conv.begins.size(), 0);
    for (long place = 0; place < conv.places; ++place) {
        for (long o = 0; o < conv.outputs; ++o) {
            const float slope = slope_out[place * conv.outputs + o];
            const long pixel = conv.pixel_of[chosen[place * conv.chosen_by_place + o * conv.chosen_by_output]];
            const long entry = pixel * conv.outputs + conv.entries[pixel];
            conv.entry_slope[entry] = slope, conv.entry_output[entry] = std::int32_t(o * conv.filter);
            conv.entries[pixel] += slope != 0;
        }
    }
}

// Adds to the slope of the framed image what a piece of all filters contributes at one column of whole outputs. Patches overlap
// from one output to the next: the rows that they share stay in registers.
template <int R, int V>
void column_slopes(const Conv &conv, long x, long piece, float *patch) {
    vec sums[R * V] = {};
    const auto finish_row = [&] {
        unrolled<V>([&](auto v) { store(patch + v * LANES, load(patch + v * LANES) + sums[v]); });
        unrolled<R * V>([&](auto i) { sums[i] = i + V < R * V ? sums[(i + V) % (R * V)] : vec{}; });
        patch += conv.row;
    };
    for (long y = 0; y < conv.whole_height; ++y) {
        const long pixel = y * conv.whole_width + x, begin = pixel * conv.outputs, end = begin + conv.entries[pixel];
        for (long entry = begin; entry < end; ++entry) {
            const float *weight = conv.weight.weight + conv.entry_output[entry] + piece;
            const vec slope = spread(conv.entry_slope[entry]);
            unrolled<R * V>([&](auto i) { sums[i] += slope * load(weight + i / V * conv.run_padded + i % V * LANES); });
        }
        const long rows = y + 1 < conv.whole_height ? conv.stride_height : R;
        for (long done = 0; done < rows; ++done) finish_row();
    }
}

void find_frame_slopes(const Conv &conv, const float *slope_out, const std::int32_t *chosen) {
    collect_entries(conv, slope_out, chosen);
    std::fill_n(conv.slope_frame, conv.framed_height * conv.row + LANES, 0.0f);
    in_taps(conv, [&](auto r, auto v, long y, long k) {
        for (long x = 0; x < conv.whole_width; ++x) {
            column_slopes<r, v>(conv, x, y * conv.run_padded + k, conv.slope_frame + conv.begins[x] + y * conv.row + k);
        }
    });
}

// Adds one image's slopes; leaves the slope of what entered in slope_frame, unless the layer is the first.
void backward(const Conv &conv, const Image &image, long example) {
    const float *slope_out = conv.slope_out + example * conv.numbers_out();
    const std::int32_t *chosen = conv.chosen + example * conv.places * padded(conv.outputs);
    add_filter_slopes(conv, framed(conv, image), slope_out, chosen);
    if (!conv.first) find_frame_slopes(conv, slope_out, chosen);
}

// Hands the slope of what entered, less its padding, to the convolution before.
void pass_back(const Conv &conv, const Conv &before, long example) {
    const long count = conv.width * conv.channels;
    for (long y = 0; y < conv.height; ++y) {
        const float *slope = conv.slope_frame + (y + conv.pad_height) * conv.row + conv.pad_width * conv.channels;
        const long at = example * before.numbers_out() + y * count;
        behind_relu(slope, before.output + at, before.relu, count, before.slope_out + at);
    }
}

void pass_back(const Dense &layer, const Conv &before, long examples) {
    for (long n = 0; n < examples; ++n) {
        for (long column = 0; column < layer.inputs; column += LANES) {
            const long at = n * before.numbers_out() + column, count = std::min<long>(LANES, layer.inputs - column);
            behind_relu(layer.slope_in.at(column, n), before.output + at, before.relu, count, before.slope_out + at);
        }
    }
}

// Lays the filters out for the forward kernel: (vector of outputs, number, output) or (number, output).
void lay_out_forward(const Conv &conv) {
    const long outputs = conv.along_pixels ? conv.outputs : LANES, block = conv.kernel_height * conv.run * LANES;
    for (long o = 0; o < conv.outputs; ++o) {
        float *to = conv.forward_weight + (conv.along_pixels ? o : o / LANES * block + o % LANES);
        for (long y = 0; y < conv.kernel_height; ++y) {
            const float *from = conv.weight.weight + o * conv.filter + y * conv.run_padded;
            for (long k = 0; k < conv.run; ++k, to += outputs) *to = from[k];
        }
    }
}

// Moves the filters down the slopes of the whole batch; returns the value of the pulls on them.
double move_filters(const Conv &conv, const Rule &rule) {
    for (long at = 0; at < conv.outputs * conv.filter; at += conv.run_padded) {
        std::fill(conv.slope + at + conv.run, conv.slope + at + conv.run_padded, 0.0f);  // read beyond the patch
    }
    double pulled = move_all(conv.weight, conv.slope, conv.outputs * conv.filter, rule);
    if (conv.has_bias) pulled += move_all(conv.bias, conv.bias_slope, conv.outputs, rule);
    std::fill_n(conv.slope, conv.outputs * conv.filter, 0.0f);
    std::fill_n(conv.bias_slope, conv.outputs, 0.0f);
    lay_out_forward(conv);
    return pulled;
}

// Calls visit(theirs, ours, count) for each run of numbers that follow each other in torch's layout of a filter,
// (channels, height, width), and in ours, (height, width, channels).
template <class Visit>
void for_each_run(const Conv &conv, Visit visit) {
    long theirs = 0;
    for (long o = 0; o < conv.outputs; ++o) {
        for (long c = 0; c < conv.channels; ++c) {
            for (long y = 0; y < conv.kernel_height; ++y) {
                const long ours = o * conv.filter + y * conv.run_padded + c;
                for (long x = 0; x < conv.kernel_width; ++x) visit(theirs++, ours + x * conv.channels, 1);
            }
        }
    }
}

// The same for a linear layer whose inputs are `channels` planes in torch, and pixels of `channels` numbers here.
template <class Visit>
void for_each_run(const Dense &layer, long channels, Visit visit) {
    const long pixels = layer.inputs / channels, panel = layer.outputs * LANES;
    for (long o = 0; o < layer.outputs; ++o) {
        const long theirs = o * layer.inputs, ours = o * LANES;
        if (channels == 1) {
            for (long i = 0; i < layer.inputs; i += LANES) {
                visit(theirs + i, ours + i / LANES * panel, std::min<long>(LANES, layer.inputs - i));
            }
            continue;
        }
        for (long c = 0; c < channels; ++c) {
            for (long i = 0, column = c; i < pixels; ++i, column += channels) {
                visit(theirs + c * pixels + i, ours + column / LANES * panel + column % LANES, 1);
            }
        }
    }
}

// The same for the first layer; in square blocks, so that both sides stay near.
template <class Visit>
void for_each_run(const Entry &layer, Visit visit) {
    for (long panel = 0; panel < layer.outputs; panel += LANES) {
        for (long begin = 0; begin < layer.inputs; begin += LANES) {
            const long last = std::min<long>(panel + LANES, layer.outputs), end = std::min<long>(begin + LANES, layer.inputs);
            for (long o = panel; o < last; ++o) {
                for (long i = begin; i < end; ++i) visit(o * layer.inputs + i, panel * layer.inputs + i * LANES + o - panel, 1);
            }
        }
    }
}

// Reads weights and anchors from torch's layout; `runs` calls its argument as for_each_run does.
template <class Runs>
void pack(const Moving &tensor, const float *weight, const float *anchor, Runs runs) {
    runs([&](long theirs, long ours, long count) { std::copy_n(weight + theirs, count, tensor.weight + ours); });
    if (anchor) runs([&](long theirs, long ours, long count) { std::copy_n(anchor + theirs, count, tensor.anchor + ours); });
}

// A bias has one layout.
void pack_bias(const Moving &bias, const LayerSpec &spec) {
    if (!spec.bias) return;
    std::copy_n(spec.bias, spec.outputs, bias.weight);
    if (spec.bias_anchor) std::copy_n(spec.bias_anchor, spec.outputs, bias.anchor);
}

template <class Runs>
void unpack(const Moving &tensor, float *weight, Runs runs) {
    runs([&](long theirs, long ours, long count) { std::copy_n(tensor.weight + ours, count, weight + theirs); });
}

using Rows = std::vector<std::int64_t>;

struct Network {
    const Job &job;
    Rule rule;
    Arena arena;
    std::vector<Conv> convs;      // first,
    std::vector<Entry> entries;   // or one linear layer,
    std::vector<Dense> denses;    // then the others
    Sheet logits;
    bool entered = false;         // whether what leaves the first layer in this step was computed in the last one

    explicit Network(const Job &given);
    double step(const Rows &rows, const Rows &next);
    void finish() const;

private:
    template <class Visit>
    void for_each_tensor(Visit visit) const;
    const Linear &last() const { return denses.empty() ? static_cast<const Linear &>(entries[0]) : denses.back(); }
    Image image_into(const Conv &conv, long row, long example) const;
    void enter(const Rows &rows);
    void forward_all(const Rows &rows);
    double loss_and_slopes(const Rows &rows);
    double backward_all(const Rows &rows, const Rows &next);
    double backward_entry(long examples, const Rows &next);
};

Network::Network(const Job &given) : job(given), rule{float(given.lr), float(given.momentum), float(given.weight_decay)} {
    for (long i = 0; i < job.layer_count; ++i) {
        const LayerSpec &spec = job.layers[i];
        if (spec.is_conv) {
            convs.emplace_back(arena, spec, rule, job.batch, i == 0);
        } else if (i == 0) {
            entries.emplace_back(arena, spec, rule, job.batch);
        } else {
            denses.emplace_back(arena, spec, rule, job.batch);
        }
    }
    for_each_tensor([](const LayerSpec &spec, const Moving &weight, const Moving &bias, auto runs) {
        pack(weight, spec.weight, spec.weight_anchor, runs);
        pack_bias(bias, spec);
    });
    for (const Conv &conv : convs) lay_out_forward(conv);
    const long classes = padded(last().outputs);
    logits = {arena.floats(classes * job.batch), classes, job.batch};
}

// Calls visit(spec, weight, bias, runs) layer by layer; `runs` calls its argument as for_each_run does.
template <class Visit>
void Network::for_each_tensor(Visit visit) const {
    const LayerSpec *spec = job.layers;
    for (const Conv &conv : convs) {
        visit(*spec++, conv.weight, conv.bias, [&](auto each) { for_each_run(conv, each); });
    }
    for (const Entry &layer : entries) {
        visit(*spec++, layer.weight, layer.bias, [&](auto each) { for_each_run(layer, each); });
    }
    for (const Dense &layer : denses) {
        const long channels = &layer == &denses[0] && !convs.empty() ? convs.back().outputs : 1;
        visit(*spec++, layer.weight, layer.bias, [&](auto each) { for_each_run(layer, channels, each); });
    }
}

// Writes what was trained over the weights that came.
void Network::finish() const {
    for_each_tensor([](const LayerSpec &spec, const Moving &weight, const Moving &bias, auto runs) {
        unpack(weight, spec.weight, runs);
        if (spec.bias) std::copy_n(bias.weight, spec.outputs, spec.bias);
    });
}

Image Network::image_into(const Conv &conv, long row, long example) const {
    if (conv.first) return {job.x + row * conv.numbers_in(), conv.height * conv.width, conv.width, 1};
    const Conv &before = (&conv)[-1];
    return {before.output + example * before.numbers_out(), 1, conv.width * conv.channels, conv.channels};
}

// Lays examples out for a linear layer at the head of the chain.
void read_into(float *input, const Entry &layer, const float *x, const Rows &rows) {
    for (std::size_t n = 0; n < rows.size(); ++n) {
        const float *row = x + rows[n] * layer.inputs;
        for (long i = 0; i < layer.inputs; ++i) input[i * layer.batch + long(n)] = row[i];
    }
}

// Takes the examples through the layers before the second linear one.
void Network::enter(const Rows &rows) {
    const Sheet &to = denses.empty() ? logits : denses[0].input;
    if (!entries.empty() && !entered) {
        read_into(entries[0].input, entries[0], job.x, rows);
        forward(entries[0], long(rows.size()), to);
    }
    for (long n = 0; !convs.empty() && n < long(rows.size()); ++n) {
        for (const Conv &conv : convs) forward(conv, image_into(conv, rows[n], n), n);
        const Conv &conv = convs.back();
        pour(conv.output + n * conv.numbers_out(), conv.numbers_out(), to, n);
    }
}

void Network::forward_all(const Rows &rows) {
    enter(rows);
    for (const Dense &layer : denses) forward(layer, long(rows.size()), &layer == &denses.back() ? logits : (&layer)[1].input);
}

// The mean cross entropy, and its slope at the logits.
double Network::loss_and_slopes(const Rows &rows) {
    const long examples = long(rows.size()), classes = last().outputs;
    double loss = 0;
    for (long n = 0; n < examples; ++n) {
        float *row = logits.at(0, n), sum = 0;
        const long label = job.y[rows[n]];
        const float greatest = *std::max_element(row, row + classes), chosen = row[label] - greatest;
        for (long o = 0; o < classes; ++o) sum += row[o] = std::exp(row[o] - greatest);
        loss += std::log(sum) - chosen;
        for (long o = 0; o < classes; ++o) *last().slope_out.at(o, n) = (row[o] / sum - float(o == label)) / float(examples);
    }
    return loss / double(examples);
}

// Moves the first layer, and takes the next step's examples through it in the same pass if a group holds them.
double Network::backward_entry(long examples, const Rows &next) {
    Entry &layer = entries[0];
    entered = long(next.size()) == examples && is_one_piece(Groups{}, examples);
    if (!entered) return backward(layer, examples, rule, {});
    read_into(layer.next_input, layer, job.x, next);
    const double pulled = backward(layer, examples, rule, denses.empty() ? logits : denses[0].input);
    std::swap(layer.input, layer.next_input);
    return pulled;
}

// Moves all weights; returns the value of the pulls before they moved.
double Network::backward_all(const Rows &rows, const Rows &next) {
    const long examples = long(rows.size());
    double pulled = 0;
    for (long i = long(denses.size()) - 1; i >= 0; --i) {
        pulled += backward(denses[i], examples, rule);
        if (i > 0) pass_back(denses[i], denses[i - 1], examples);
    }
    if (!entries.empty()) {
        if (!denses.empty()) pass_back(denses[0], entries[0]);
        return pulled + backward_entry(examples, next);
    }
    pass_back(denses[0], convs.back(), examples);
    for (long n = 0; n < examples; ++n) {
        for (long i = long(convs.size()) - 1; i >= 0; --i) {
            backward(convs[i], image_into(convs[i], rows[n], n), n);
            if (i > 0) pass_back(convs[i], convs[i - 1], n);
        }
    }
    for (const Conv &conv : convs) pulled += move_filters(conv, rule);
    return pulled;
}

// One step; `next` are the rows of the step after it. Returns its loss.
double Network::step(const Rows &rows, const Rows &next) {
    forward_all(rows);
    const double loss = loss_and_slopes(rows);
    return loss + backward_all(rows, next) + job.pull_floor;
}

enum Outcome { TRAINED = 0, ROW_OUTSIDE = 1, LABEL_OUTSIDE = 2, NO_MEMORY = 3 };

// Whether every row of the order is in the store and has a label that the network knows.
Outcome checked(const Job &job) {
    const std::int64_t classes = job.layers[job.layer_count - 1].outputs;
    for (std::int64_t i = 0; i < job.steps * job.batch; ++i) {
        if (job.order[i] >= job.rows) return ROW_OUTSIDE;
        if (job.order[i] >= 0 && (job.y[job.order[i]] < 0 || job.y[job.order[i]] >= classes)) return LABEL_OUTSIDE;
    }
    return TRAINED;
}

// The rows of each step, without the padding; a step that is all padding is the identity, and left out.
std::vector<Rows> steps_of(const Job &job) {
    std::vector<Rows> steps;
    for (std::int64_t step = 0; step < job.steps; ++step) {
        const std::int64_t *order = job.order + step * job.batch;
        Rows rows;
        std::copy_if(order, order + job.batch, std::back_inserter(rows), [](std::int64_t row) { return row >= 0; });
        if (!rows.empty()) steps.push_back(std::move(rows));
    }
    return steps;
}

void train(Job &job) {
    Network network(job);
    const std::vector<Rows> steps = steps_of(job);
    double total = 0, seen = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
        const double examples = double(steps[i].size());
        total += network.step(steps[i], i + 1 < steps.size() ? steps[i + 1] : Rows{}) * examples;
        seen += examples;
    }
    network.finish();
    job.loss = total / std::max(seen, 1.0);
}

}  // namespace

extern "C" int glocal_train(Job *job) {
    try {
        const Outcome outcome = checked(*job);
        if (outcome == TRAINED) train(*job);
        return outcome;
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    }
}
