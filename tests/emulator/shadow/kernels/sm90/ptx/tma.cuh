// SPDX-License-Identifier: Apache-2.0
// The emulator's tensor memory accelerator, in place of kernels/sm90/ptx/tma.cuh: copies land after
// a while, in any order.
#pragma once

#include <array>
#include <cstring>

#include "kernels/sm90/ptx/barrier.cuh"

namespace moeos::sm90 {

struct alignas(64) TensorMap {
  const u8* base;
  u64 rows;
  u64 columns;
  u32 box_rows;
  u32 element_bytes;
  u32 box_bytes;  // of a row in a box, the swizzle's width
  u64 row_bytes;  // from one row to the next
  // In a map by which boxes are stored, each dimension but the columns:
  u64 sizes[4];
  u64 strides[4];  // in rows
  u32 box[4];
};
static_assert(sizeof(TensorMap) == 128);

enum class CachePolicy : u64 { normal, evict_first };

inline void prefetch(const TensorMap&) {}

/// A swizzle: 16-byte pieces change places within as many bytes, by which 128 bytes they are in.
inline u8* swizzled(u8* place, u32 width = 128) {
  const auto address = reinterpret_cast<u64>(place);
  return reinterpret_cast<u8*>(address ^ ((address >> 7 & (width / 16 - 1)) << 4));
}

/// Copies a box whose row r is row `row` + order(r) of the matrix.
template <class Order>
void load_rows(const TensorMap& map, void* destination, Barrier& barrier, u32 row, u32 column,
               Order order) {
  const u32 bytes = map.element_bytes;
  const u32 columns = map.box_bytes / bytes;
  if (map.base == nullptr) {
    emulator::stop("loads through a tensor map that nobody has made");
  }
  emulator::later([&map, to = static_cast<u8*>(destination), &barrier, row, column, order, bytes,
                   columns] {
    for (u32 r = 0; r < map.box_rows; ++r) {
      const u32 from = row + order(r);
      for (u32 c = 0; c < columns; ++c) {
        u8* place = swizzled(to + (r * columns + c) * bytes, map.box_bytes);
        if (from < map.rows && column + c < map.columns) {
          std::memcpy(place, map.base + u64{from} * map.row_bytes + (column + c) * bytes, bytes);
        } else {
          std::memset(place, 0, bytes);
        }
      }
    }
    barrier.complete(map.box_rows * map.box_bytes);
  });
}

inline void load_box(const TensorMap& map, void* destination, Barrier& barrier, u32 row,
                     u32 column) {
  load_rows(map, destination, barrier, row, column, [](u32 r) { return r; });
}

inline constexpr u32 kOrderedRows = 32;

inline void load_weights(const TensorMap& map, void* destination, Barrier& barrier, u32 row,
                         u32 column, CachePolicy) {
  // The map's bound holds for eight rows at a time, and for a box's first group alone.
  if (row % 8 != 0 || map.box_rows % kOrderedRows != 0 ||
      (map.box_rows > kOrderedRows && row + map.box_rows > map.rows)) {
    emulator::stop("a box of weights that begins amid eight rows, or ends beyond the matrix");
  }
  load_rows(map, destination, barrier, row, column, [](u32 r) {
    const u32 within = r % kOrderedRows;
    return r - within + within / 2 % 4 * 8 + within / 8 * 2 + within % 2;
  });
}

/// `map.sizes[0]` is the rows of each matrix: what lies beyond a matrix is zeros.
inline void load_transposed(const TensorMap& map, void* destination, Barrier& barrier, u32 matrix,
                            u32 row, u32 column, CachePolicy) {
  const auto of_matrix = static_cast<u32>(map.sizes[0]);
  load_rows(map, destination, barrier, 0, column,
            [=](u32 r) { return row + r < of_matrix ? matrix * of_matrix + row + r : ~0U; });
}

/// `map` has all its dimensions, like one by which boxes are stored.
inline void load_ordered(const TensorMap& map, void* destination, Barrier& barrier, u32 matrix,
                         u32 row, u32 column) {
  const std::array<u32, 4> first = {0, 0, row / 8, matrix};
  if (row % 8 != 0) {
    emulator::stop("an ordered box that begins amid eight rows");
  }
  TensorMap rows = map;
  rows.box_rows = map.box[0] * map.box[1] * map.box[2] * map.box[3];
  rows.rows = ~u64{0};
  emulator::later([rows, to = static_cast<u8*>(destination), &barrier, column, first] {
    const u32 bytes = rows.element_bytes;
    for (u32 r = 0; r < rows.box_rows; ++r) {
      u64 from = 0;
      bool inside = true;
      u32 rest = r;
      for (u32 d = 0; d < 4; ++d) {
        const u64 place = first[d] + rest % rows.box[d];
        rest /= rows.box[d];
        inside = inside && place < rows.sizes[d];
        from += place * rows.strides[d];
      }
      for (u32 c = 0; c < rows.box_bytes / bytes; ++c) {
        u8* const place = swizzled(to + r * rows.box_bytes + c * bytes, rows.box_bytes);
        if (inside && column + c < rows.columns) {
          std::memcpy(place, rows.base + from * rows.row_bytes + (column + c) * bytes, bytes);
        } else {
          std::memset(place, 0, bytes);
        }
      }
    }
    barrier.complete(rows.box_rows * rows.box_bytes);
  });
}

inline void load_bytes(const void* source, void* destination, u32 bytes, Barrier& barrier) {
  emulator::later([source, destination, bytes, &barrier] {
    std::memcpy(destination, source, bytes);
    barrier.complete(bytes);
  });
}

inline void store_bytes(const void* source, u64 destination, u32 bytes) {
  unsigned& under_way = emulator::store_groups().back();
  ++under_way;
  emulator::later([source, destination, bytes, &under_way] {
    std::memcpy(reinterpret_cast<void*>(destination), source, bytes);
    --under_way;
  });
}
inline void store_box(const TensorMap& map, const void* source, const u32 (&at)[5]) {
  if (map.base == nullptr) {
    emulator::stop("stores through a tensor map that nobody has made");
  }
  unsigned& under_way = emulator::store_groups().back();
  ++under_way;
  const std::array<u32, 5> from = {at[0], at[1], at[2], at[3], at[4]};
  emulator::later([&map, source, from, &under_way] {
    u32 rows = map.box[0] * map.box[1] * map.box[2] * map.box[3];
    for (u32 r = 0; r < rows; ++r) {
      u64 row = 0;
      bool inside = true;
      u32 rest = r;
      for (u32 d = 0; d < 4; ++d) {
        const u64 place = from[1 + d] + rest % map.box[d];
        rest /= map.box[d];
        inside = inside && place < map.sizes[d];
        row += place * map.strides[d];
      }
      for (u32 c = 0; c < map.box_bytes / map.element_bytes; ++c) {
        if (inside && from[0] + c < map.columns) {
          auto* const place = static_cast<u8*>(const_cast<void*>(source)) + r * map.box_bytes;
          std::memcpy(
              const_cast<u8*>(map.base) + row * map.row_bytes + (from[0] + c) * map.element_bytes,
              swizzled(place + c * map.element_bytes, map.box_bytes), map.element_bytes);
        }
      }
    }
    --under_way;
  });
}
inline void commit_stores() { emulator::store_groups().push_back(0); }
template <u32 kGroups>
inline void wait_until_read() {
  std::deque<unsigned>& groups = emulator::store_groups();
  const auto landed = [&groups] {
    while (groups.size() > 1 && groups.front() == 0) {
      groups.pop_front();
    }
    return groups.size() <= 1 + kGroups;  // the open one is not waited for
  };
  emulator::wait_until("its bulk stores", landed);
}
inline void wait_until_stored() { wait_until_read<0>(); }

}  // namespace moeos::sm90
