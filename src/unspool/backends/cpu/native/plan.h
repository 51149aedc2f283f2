// What runs: a flat list of operations over numbered buffers, built in Python (`plan.py`).
//
// Every worker thread goes through the same list and takes tasks of each operation until all are
// done. Structures that Python fills are plain and spelled the same in
// `structures.py`.
#pragma once
#include <cstdint>

#include "layout.h"
#include "pool.h"

namespace unspool {

constexpr int kPage = 16;      // tokens in a page of keys and values
constexpr int kSegment = 512;  // keys whose softmax is taken together; see attend.cpp

enum Kind : int32_t {
    kEmbed = 0,      // target = row of the table for each token (+ a row for its position)
    kNorm = 1,       // target = norm(source), or is increased by it
    kLinear = 2,     // target = matrices * prepared source (+ bias), or is increased by it
    kRope = 3,       // turn queries and keys by their position; write keys and values to pages
    kAttention = 4,  // target = what each head gathers from the pages
    kRoute = 5,      // choose the experts of each token
    kExperts = 6,    // kLinear with the matrices of each row's own expert
    kCombine = 7,    // target += the weighted answers of a token's experts
    kGather = 8,     // target = the rows whose logits are wanted
    kSoftcap = 9,    // target = cap * tanh(target / cap)
    kSnapshot = 10,  // copy the rows somebody looks at; nothing when nobody does
    kActivate = 11,  // target = activated target (times a part of the source)
    kScale = 12,     // target = scale * source (times a vector's one number), or grows by it
    kGate = 13,      // target *= the sigmoid (or activation) of a part of the source
    kConv = 14,      // target = each channel's sum over the last tokens, from state to state
    kDelta = 15,     // target = what queries find in the heads' matrices, from state to state
    kMamba = 16,     // the same, where values are added to the matrices (Mamba-2)
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
    kRelu2 = 6,  // the square of relu
};
enum Flags : int32_t {
    kAddToTarget = 1,
    kGated = 2,    // the source's rows are [gate | up]
    kCentred = 4,  // the norm takes the mean away first (LayerNorm)
    kNormalizeExperts = 8,
    kQueriesOnly = 16,     // kPlace: the source has no keys and values, and none are written
    kBidirectional = 32,   // kAttend: the window reaches as far ahead as back
    kKeysAsValues = 64,    // kPlace: the source has no values; keys before their norm and turn are
    kNormValues = 128,     // kPlace: values are normed, without a weight
    kSigmoidRouter = 256,  // kRoute: weights are sigmoids of the scores, not their softmax
    kTiledHeads = 512,     // kDelta: value head h has key head h % key_heads, not its neighbours'
    kGroupWeights = 1024,  // kNorm: each part has weights of its own, one behind the other
};

struct Op {
    int32_t kind;
    int32_t rows;    // how many rows it works on: see Rows
    int32_t source;  // buffers
    int32_t target;
    int32_t offset;  // kNorm: where in a row the normed part begins ...
    int32_t width;   // ... and how wide it is; elsewhere the width of the source's rows
    int32_t heads;   // kPlace, kAttend: of queries; kNorm: parts that are normed each by itself;
                     // kGate: 1: the row has one gate for all, kDelta, kMamba: of values
    int32_t matrix;  // the first of `matrix_count` matrices with the same input
    int32_t matrix_count;
    int32_t vector;         // norm weight, positions, sinks (kAttend), what experts count; -1: none
    int32_t second_vector;  // norm bias; the norm of keys (kPlace); kConv: bias, -1: none
    int32_t layer;
    int32_t window;  // kAttend: how many last tokens are seen, itself among them; 0: all
    int32_t rotary;  // kPlace: number of the table of angles, -1: none
    int32_t prepare;
    int32_t activation;
    int32_t flags;
    int32_t experts;            // kRoute: how many there are
    int32_t experts_per_token;  // kRoute: how many each token gets
    int32_t
        second_source;  // kDelta: the buffer whose rows have [b | a] at `offset`; kMamba: [dt | -]
    int32_t state_offset;  // kConv, kDelta, kMamba: where in a text's state this begins, in floats
    int32_t key_heads;     // kDelta, kMamba; `heads` are those of values, `width` is that of a key
    int32_t value_width;   // kDelta, kMamba
    int32_t third_vector;  // kMamba: how much of a head's value passes by
    float scale;           // kPlace: by how much queries grow (see cap)
    float cap;  // kPlace: ... with every so many positions; 0: they do not; elsewhere that
                // of a softcap, or of what the activation kSwigluClamped lets through
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

// Where the keys and values of a layer lie in each page. Layers that share them have the same.
struct LayerPages {
    int64_t offset;  // from the page's beginning, in bytes
    int32_t heads;   // of keys; 0: the layer has none
    int32_t head_width;
};

// Keys and values: [page][layer][keys, values][kv head][bytes of a page's head].
// Keys of a page lie as [head_width][16 tokens], values as [16 tokens][head_width], where the head
// is filled up to a multiple of 16. With 8 bits, sixteen floats follow: what each token's numbers
// are multiplied with.
struct KvCache {
    uint8_t* data;
    int64_t pages;
    int64_t page_bytes;
    const LayerPages* layers;
    int64_t bits;  // 8, 16 or 32
};

// What an adapter adds to one matrix: up * (down * row), its scale multiplied into `up`.
struct LowRank {
    const float* down;  // [rank, columns]; null: nothing is added to this matrix
    const float* up;    // [rows / 16, rank, 16], filled up with zeros
    int64_t rank;
};

// The adapters of a batch's rows.
struct Adapters {
    const int64_t* row_adapters;  // [rows]: which one each row has, -1: none
    const LowRank* parts;         // [count, matrices of the plan]
    int64_t count;
    int64_t max_rank;  // numbers that `down` gives, for all matrices with one input together
};

// A ragged batch, as in `backends/step.py`.
struct Batch {
    const int64_t* tokens;
    const int64_t* positions;
    const int64_t* visible_end;  // each token sees the positions before this one
    const int64_t* starts;       // [rows + 1]
    const int64_t* slots;        // [rows]: each row's line of the block table
    const int64_t* table;        // [table_rows, table_columns]: pages
    const int64_t* selected;
    int64_t count;  // of tokens
    int64_t rows;
    int64_t table_rows;
    int64_t table_columns;
    int64_t selected_count;
    const Adapters* adapters;  // null: nobody has one
    // Tokens whose keys and values are written into further lines of the block table too, at their
    // own position: token t into echo_lines[echo_starts[t] ... echo_starts[t + 1]].
    const int64_t* echo_starts;  // [count + 1]; null: none are
    const int64_t* echo_slots;
    // Recurrent states: `state_floats` numbers a slot. A row reads one (-1: zeros) and writes one,
    // [rows, 2]. The state behind token t goes to capture_slots[capture_starts[t] ...] as well.
    float* state_data;
    int64_t state_slots;
    int64_t state_floats;
    const int64_t* states;
    const int64_t* capture_starts;  // [count + 1]; null: none are kept on the way
    const int64_t* capture_slots;

    float* state(int64_t slot) const { return state_data + slot * state_floats; }
    const int64_t* pages(int64_t row) const { return table + slots[row] * table_columns; }
};

// What somebody looks at. Both outputs are laid out by Python.
struct Taps {
    const int64_t* rows;  // tokens whose vectors are copied at each snapshot
    int64_t row_count;
    float* snapshots;                  // [snapshots, row_count, width]
    const int64_t* attention_offsets;  // [count]: for each token where its weights go, or -1
    float* weights;  // a token's weights: [layers, heads, past], at attention[token]
    const int64_t*
        snapshot_rows;  // [snapshots of the plan]: where each goes, -1: nowhere; null: in order
    int64_t heads;      // of the layer that has most
    // Recurrent layers: [count]: where a token's numbers go, or -1 (null: the model has none).
    // Those of a layer begin at layer * recurrent_room.
    const int64_t* recurrent_offsets;
    float* recurrent_stats;
    int64_t recurrent_stride;
};

struct Buffer {
    float* data;
    int64_t width;
    float* row(int64_t number) const { return data + number * width; }
};

// The rows of experts: picks sorted by expert, so that each expert's rows are neighbours.
struct Routing {
    int32_t* token;   // [picks] whose pick it is
    int32_t* slot;    // [tokens * chosen] where a token's picks are, in the order of their weight
    float* weight;    // [tokens * chosen]
    int32_t* starts;  // [experts + 1]
    int64_t experts_per_token;
};

// One activation row as whole numbers: 32 of them share a scale.
struct QuantizedRows {
    int8_t* quants;      // [rows, columns]
    float* scales;       // [rows, columns / 32]
    int32_t* sums;       // [rows, columns / 16]: of the numbers, for offsets and minima
    float* scaled_sums;  // [rows, columns / 32]: scale * sum, what a minimum is multiplied with
    // The same once more as tile registers like it, sixteen rows together (null: not wanted).
    int8_t* tiled;       // [rows / 16, columns / 32, 16, 32]: numbers
    float* tile_scales;  // [rows / 16, columns / 32, 2, 16]: scales and lows
    float* values;       // [rows, columns]: the same rows as floats, for matrices of floats
    int64_t columns;     // filled up to a multiple of 32
};

// Everything an operation can see.
struct RunContext {
    const Matrix* matrices;
    const Vector* vectors;
    const RopeTable* rotary;
    const Buffer* buffers;
    KvCache kv;
    Batch batch;
    const Taps* taps;       // null: nobody looks
    const int32_t* row_of;  // [count]: the batch's row of each token
    Routing routing;
    QuantizedRows prepared;  // room for all rows, shared by the workers
    int64_t matrix_count;    // of the plan
    float* low;              // room for what adapters make of each row
    float* partial;          // room for the segments of attention
    int64_t partial_size;    // in floats
};

// Calls f with every slot that takes the state behind a token: those that keep it on the way, and
// the row's own behind its last token.
template <class F>
inline void for_each_state_slot(const Batch& batch, int64_t row, int64_t token, F f) {
    if (batch.capture_starts != nullptr)
        for (int64_t i = batch.capture_starts[token]; i < batch.capture_starts[token + 1]; ++i)
            f(batch.state(batch.capture_slots[i]));
    if (token + 1 == batch.starts[row + 1]) f(batch.state(batch.states[2 * row + 1]));
}

// Where what is seen of a token in a recurrent layer goes; null: nobody looks.
inline float* stats_of(const RunContext& run, const Op& op, int64_t token) {
    if (run.taps == nullptr || run.taps->recurrent_offsets == nullptr) return nullptr;
    const int64_t offset = run.taps->recurrent_offsets[token];
    return offset < 0 ? nullptr
                      : run.taps->recurrent_stats + offset + op.layer * run.taps->recurrent_stride;
}

inline int64_t rows_of(const RunContext& run, const Op& op) {
    if (op.rows == kSelected) return run.batch.selected_count;
    if (op.rows == kRouted) return run.batch.count * run.routing.experts_per_token;
    return run.batch.count;
}

// A head's numbers, filled up (with zeros) to whole registers.
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
