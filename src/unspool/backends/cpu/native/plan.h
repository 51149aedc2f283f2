// The execution plan: a flat list of operations over numbered buffers, built in Python (`plan.py`).
//
// Every worker thread walks the same list and takes tasks of each operation until all are done.
// Structures that Python fills have the same fields in `structures.py`.
#pragma once
#include <cstdint>

#include "layout.h"
#include "pool.h"

namespace unspool {

constexpr int kPage = 16;      // tokens in a KV cache page
constexpr int kSegment = 512;  // keys per softmax segment; see attention.cpp

enum Kind : int32_t {
    kEmbed = 0,      // target = embedding of each token (+ position embedding)
    kNorm = 1,       // target = norm(source), or += it
    kLinear = 2,     // target = matrices * prepared source (+ bias), or += it
    kRope = 3,       // apply RoPE to queries and keys; write keys and values to pages
    kAttention = 4,  // target = attention of each head over the pages
    kRoute = 5,      // select the experts of each token
    kExperts = 6,    // kLinear with the matrices of each row's expert
    kCombine = 7,    // target += weighted sum of a token's expert outputs
    kGather = 8,     // target = the selected rows of source
    kSoftcap = 9,    // target = cap * tanh(target / cap)
    kSite = 10,      // change and read the source's rows; nothing if neither is requested
    kActivate = 11,  // target = activation(target) (times a part of the source)
    kScale = 12,     // target = scale * source (times a scalar weight), or += it
    kGate = 13,      // target *= the sigmoid (or activation) of a part of the source
    kConv = 14,      // target = causal convolution of each channel; has a state
    kDelta = 15,     // target = gated DeltaNet heads; has a state
    kMamba = 16,     // target = Mamba-2 heads; has a state
    kStash = 17,     // keep the source's rows for the kSite of the same number, which works on the
                     // difference; nothing if that does nothing
};

enum Rows : int32_t { kTokens = 0, kSelected = 1, kRouted = 2 };
enum Prepare : int32_t { kPrepareNone = 0, kPrepareNorm = 1, kPrepareActivation = 2 };
enum Activation : int32_t {
    kSilu = 0,
    kGelu = 1,
    kGeluTanh = 2,
    kRelu = 3,
    kSigmoid = 4,
    kSwigluClamped = 5,
    kRelu2 = 6,  // relu squared
};
enum Flags : int32_t {
    kAddToTarget = 1,
    kGated = 2,    // the source's rows are [gate | up]
    kCentred = 4,  // the norm subtracts the mean first (LayerNorm)
    kNormalizeExperts = 8,
    kQueriesOnly = 16,    // kRope: the source has no keys and values; none are written
    kBidirectional = 32,  // kAttention: the window extends ahead as far as back
    kKeysAsValues = 64,   // kRope: the source has no values; they are the keys before norm and RoPE
    kNormValues = 128,    // kRope: values are normed, without a weight
    kSigmoidRouter = 256,  // kRoute: sigmoid instead of softmax of the scores
    kTiledHeads = 512,     // kDelta: value head h uses key head h % key_heads, not h / group
    kGroupWeights = 1024,  // kNorm: each group has separate weights, concatenated
    kDifference = 2048,    // kSite: works on what was added to the source since kStash
};

struct Op {
    int32_t kind;
    int32_t rows;    // which rows it works on: see Rows
    int32_t source;  // buffers
    int32_t target;
    int32_t offset;  // kNorm: first column of the normed part
    int32_t width;   // kNorm: width of that part; elsewhere the width of the source's rows
    int32_t heads;   // query heads; kNorm: groups normed separately; kGate: 1: one gate per row;
                     // kDelta, kMamba: value heads
    int32_t matrix;  // the first of `matrix_count` matrices with the same input
    int32_t matrix_count;
    int32_t vector;         // norm weight, positions, sinks, expert weights; -1: none
    int32_t second_vector;  // norm bias, key norm (kRope), bias (kConv); -1: none
    int32_t layer;   // kSite, kStash: number of the site
    int32_t window;  // kAttention: sliding window, the token included; 0: none
    int32_t rotary;  // kRope: index of the RoPE table, -1: none
    int32_t prepare;
    int32_t activation;
    int32_t flags;
    int32_t experts;            // kRoute: number of experts
    int32_t experts_per_token;  // kRoute: experts per token
    int32_t second_source;      // buffer with [b | a] (kDelta) or [dt | -] (kMamba)
    int32_t state_offset;       // offset in a state slot, in floats
    int32_t key_heads;          // kDelta, kMamba: `heads` counts value heads, `width` is of a key
    int32_t value_width;        // kDelta, kMamba
    int32_t third_vector;       // kMamba: skip connection (D)
    float scale;                // kRope: growth of queries with the position (see cap)
    float cap;  // kRope: positions per growth step, 0: none; else the limit of a softcap or of
                // kSwigluClamped
    float epsilon;
};

struct Vector {
    const float* data;
    int64_t count;
};

// Cosines and sines, [positions, pairs] each.
struct RopeTable {
    const float* cosine;
    const float* sine;
    int64_t positions;
    int64_t pairs;
};

// Position of a layer's keys and values in each page. Layers that share them have equal entries.
struct LayerPages {
    int64_t offset;  // bytes from the start of the page
    int32_t heads;   // key heads; 0: the layer has no KV cache
    int32_t head_width;
};

// Keys and values: [page][layer][keys, values][kv head][bytes of a page's head].
// Keys of a page are stored as [head_width][16 tokens], values as [16 tokens][head_width], with the
// head padded to a multiple of 16. With 8 bits, sixteen floats follow: the scale of each token.
struct KvCache {
    uint8_t* data;
    int64_t pages;
    int64_t page_bytes;
    const LayerPages* layers;
    int64_t bits;  // 8, 16 or 32
};

// Low-rank update of one matrix (LoRA): up * (down * row); `up` includes the scale.
struct LowRank {
    const float* down;  // [rank, columns]; null: no update of this matrix
    const float* up;    // [rows / 16, rank, 16], zero-padded
    int64_t rank;
};

// The adapters of a batch's rows.
struct Adapters {
    const int64_t* row_adapters;  // [rows]: adapter of each row, -1: none
    const LowRank* parts;         // [count, matrices of the plan]
    int64_t count;
    int64_t max_rank;  // largest sum of ranks over the matrices of one operation
};

// What an intervention does with a part of a row (backends/interventions.py).
enum ChangeKind : int32_t {
    kAddVector = 0,
    kProjectOut = 1,
    kReplace = 2,
    kMultiply = 3,
    kClampFeature = 4,
};

struct Change {
    const float* vector;   // what is added; the direction; the values; the decoder
    const float* encoder;  // kClampFeature
    int64_t stride;        // floats between the vectors of two positions; 0: all have the same
    int32_t kind;
    int32_t offset;  // first column of the part
    int32_t width;
    int32_t parts;  // how many changes from here on belong together, one for each head
    float scale;    // kAddVector, kMultiply
    float bias;     // kClampFeature: feature = encoder * x + bias, 0 up to the threshold
    float threshold;
    float value;
};

// The interventions of a batch's tokens: for token t the entries `starts[t]` to `starts[t + 1]`.
struct Changes {
    const Change* changes;
    const int32_t* first_changes;  // [sites, interventions]: index of the first change, -1: none
    int64_t interventions;
    const uint8_t* is_site_used;  // [sites]
    const int64_t* starts;        // [tokens + 1]
    const int64_t* numbers;       // of the interventions, in the order in which they are applied
    const int64_t* offsets;       // position of the token in the intervention's vectors
};

// A ragged batch, as in `backends/step.py`.
struct Batch {
    const int64_t* tokens;
    const int64_t* positions;
    const int64_t* visible_end;  // each token attends to positions below this
    const int64_t* starts;       // [rows + 1]
    const int64_t* slots;        // [rows]: each row's slot in the block table
    const int64_t* table;        // [table_rows, table_columns]: pages
    const int64_t* selected;
    int64_t count;  // tokens
    int64_t rows;
    int64_t table_rows;
    int64_t table_columns;
    int64_t selected_count;
    const Adapters* adapters;  // null: none
    // Keys and values of token t are also written, at the same position, to the block table slots
    // echo_slots[echo_starts[t] ... echo_starts[t + 1]].
    const int64_t* echo_starts;  // [count + 1]; null: no echoes
    const int64_t* echo_slots;
    // Recurrent states: `state_floats` floats per slot. A row reads one slot (-1: zeros) and writes
    // one, [rows, 2]. The state after token t is also saved to capture_slots[capture_starts[t]
    // ...].
    float* state_data;
    int64_t state_slots;
    int64_t state_floats;
    const int64_t* states;
    const int64_t* capture_starts;  // [count + 1]; null: no captures
    const int64_t* capture_slots;
    const Changes* changes;  // null: none

    float* state(int64_t slot) const { return state_data + slot * state_floats; }
    const int64_t* pages(int64_t row) const { return table + slots[row] * table_columns; }
};

// Observed values. Python allocates the outputs.
struct Taps {
    // Sites: [sites] of [tokens read, width], null: not read. Token t is row token_rows[t], -1: not
    // read; of the selected rows the last `selected_rows` are read.
    float* const* targets;
    const int64_t* token_rows;
    int64_t selected_rows;
    const int64_t* attention_offsets;  // [count]: offset of each token's weights, or -1
    float* weights;                    // [layers, heads, visible] of each token, at its offset
    int64_t heads;                     // maximum over the layers
    // Recurrent layers, [count]: offset of each token's values, or -1 (null: no such layers). Those
    // of a layer start at layer * recurrent_stride.
    const int64_t* recurrent_offsets;
    float* recurrent_stats;
    int64_t recurrent_stride;
};

struct Buffer {
    float* data;
    int64_t width;
    float* row(int64_t number) const { return data + number * width; }
};

// Rows of experts: (token, expert) pairs sorted by expert, so that each expert's rows are
// contiguous.
struct Routing {
    int32_t* token;   // [pairs]: token of each pair
    int32_t* slot;    // [tokens * experts_per_token]: row of each pair, largest weight first
    float* weight;    // [tokens * experts_per_token]
    int32_t* starts;  // [experts + 1]
    int64_t experts_per_token;
};

// Activation rows quantized to int8 with a scale per 32 values.
struct QuantizedRows {
    int8_t* quants;      // [rows, columns]
    float* scales;       // [rows, columns / 32]
    int32_t* sums;       // [rows, columns / 16]: sums of quants, for offsets and minima
    float* scaled_sums;  // [rows, columns / 32]: scale * sum, the factor of a minimum
    // The same in packs of P rows, as tile registers (P = 16) or NEON (8) read them (null: unused).
    int8_t* tiled;       // [rows / P, columns / 32, 32 / C, P, C]: quants; C is 32, for NEON 4
    float* tile_scales;  // [rows / P, columns / 32, 2, P]: scales and scaled sums
    float* values;       // [rows, columns]: the same rows as floats, for float matrices
    int64_t columns;     // padded to a multiple of 32
};

// Inputs and working memory of a run.
struct RunContext {
    const Matrix* matrices;
    const Vector* vectors;
    const RopeTable* rotary;
    const Buffer* buffers;
    KvCache kv;
    Batch batch;
    const Taps* taps;       // null: nothing is observed
    const int32_t* row_of;  // [count]: batch row of each token
    Routing routing;
    QuantizedRows prepared;  // memory for all rows, shared by the workers
    int64_t matrix_count;    // of the plan
    float* low;              // memory for the low-rank products of each row
    float* stash;            // memory for kStash, a row for each token
    float* partial;          // memory for attention segments
    int64_t partial_size;    // in floats
};

// Calls f with every slot that receives the state after a token: captures, and the row's slot after
// its last token.
template <class F>
inline void for_each_state_slot(const Batch& batch, int64_t row, int64_t token, F f) {
    if (batch.capture_starts != nullptr)
        for (int64_t i = batch.capture_starts[token]; i < batch.capture_starts[token + 1]; ++i)
            f(batch.state(batch.capture_slots[i]));
    if (token + 1 == batch.starts[row + 1]) f(batch.state(batch.states[2 * row + 1]));
}

// Target of a token's observed values in a recurrent layer; null: nothing is observed.
inline float* stats_of(const RunContext& run, const Op& op, int64_t token) {
    if (run.taps == nullptr || run.taps->recurrent_offsets == nullptr) return nullptr;
    const int64_t offset = run.taps->recurrent_offsets[token];
    return offset < 0 ? nullptr
                      : run.taps->recurrent_stats + offset + op.layer * run.taps->recurrent_stride;
}

// Whether a kSite or kStash operation has something to do in this run.
inline bool is_site_used(const RunContext& run, const Op& op) {
    return (run.taps != nullptr && run.taps->targets[op.layer] != nullptr) ||
           (run.batch.changes != nullptr && run.batch.changes->is_site_used[op.layer]);
}

inline int64_t rows_of(const RunContext& run, const Op& op) {
    if (op.rows == kSelected) return run.batch.selected_count;
    if (op.rows == kRouted) return run.batch.count * run.routing.experts_per_token;
    return run.batch.count;
}

// Width of a head, zero-padded to whole registers.
inline int64_t padded_width(int64_t head_width) {
    return (head_width + kLanes - 1) / kLanes * static_cast<int64_t>(kLanes);
}

inline int64_t kv_head_bytes(const KvCache& kv, int64_t layer) {
    const int64_t padded = padded_width(kv.layers[layer].head_width);
    return kPage * padded * kv.bits / 8 + (kv.bits == 8 ? kPage * 4 : 0);
}

// The memory of one head in one page; `which` is 0 for keys and 1 for values.
inline uint8_t* kv_page(const KvCache& kv, int64_t layer, int which, int64_t head, int64_t page) {
    const LayerPages& pages = kv.layers[layer];
    return kv.data + page * kv.page_bytes + pages.offset +
           (which * pages.heads + head) * kv_head_bytes(kv, layer);
}

}  // namespace unspool
