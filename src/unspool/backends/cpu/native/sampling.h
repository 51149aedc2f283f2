// What sampling asks of logits [rows, width] that lie one row behind the other, for each row by
// itself: the C interface that `unspool.sampling` calls. A logit of -inf is no candidate.
//
// Each call fills one piece of memory, [parts, rows, ...] of eight bytes each: finding the address
// of an array costs Python more than the call.
#pragma once
#include <cstdint>

#include "export.h"

namespace unspool {
// The `count` largest of a row, largest first, equals by lower column: each value, and so many
// places `behind` it its column.
void leading(const float* logits, int64_t width, int64_t count, double* values,
             int64_t column_offset);
// Of `count` tokens those of the vocabulary: see unspool_tally.
int64_t tally(const int64_t* tokens, int64_t count, int64_t vocabulary, int64_t* unique);
}  // namespace unspool

// The largest logit of each row; NaN if one is among them.
UNSPOOL_API void unspool_peaks(const float* logits, int64_t rows, int64_t width, double* peaks);

// The peaks [rows] (given already where they are `known`), the sums of exp(logit - peak) [rows],
// and the entropies in nats [rows]. Where a peak is not finite, the others are NaN.
UNSPOOL_API void unspool_measure(const float* logits, int64_t rows, int64_t width,
                                 int32_t has_peaks, double* peaks);

// Given levels [rows], fills in behind them how many logits of each row lie at its level or above,
// as whole numbers [rows].
UNSPOOL_API void unspool_counts(const float* logits, int64_t rows, int64_t width, double* levels);

// Given one column a row as whole numbers [rows], puts their logits in their place, and behind
// them how many logits of the row lie above, as whole numbers [rows].
UNSPOOL_API void unspool_standing(const float* logits, int64_t rows, int64_t width,
                                  int64_t* columns);

// The `count` largest of each row (count <= width), largest first, equals by lower column:
// values [rows, count], and behind them the columns as whole numbers [rows, count].
UNSPOOL_API void unspool_leading(const float* logits, int64_t rows, int64_t width, int64_t count,
                                 double* values);

// Those at or above each row's level, in order of column, `room` of each row at the most: values
// [rows, room], -inf where there are no more, and behind them the columns [rows, room], 0 there.
UNSPOOL_API void unspool_above(const float* logits, int64_t rows, int64_t width,
                               const double* levels, int64_t room, double* values);

// Of `count` tokens those of the vocabulary, each once, in the order in which they first occur, and
// behind them [count] how often each does; gives how many there are.
UNSPOOL_API int64_t unspool_tally(const int64_t* tokens, int64_t count, int64_t vocabulary,
                                  int64_t* unique);

// Picks one token for each row as the chain of sampling stages does with these settings
// (`sampling/picker.py` names the columns). `threads` share the rows. A row whose logits give no
// distribution gets the token -1.
UNSPOOL_API void unspool_pick(const float* logits, int64_t rows, int64_t width,
                              const double* floats, const int64_t* ints, const int64_t* history,
                              int32_t threads, int64_t* tokens, double* logprobs);
