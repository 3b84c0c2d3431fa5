// The memory of one call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "vectors.h"

namespace {

// Zeroed memory in few large blocks. Every array has room for one vector beyond its size: kernels
// read and write whole vectors.
class Arena {
public:
    ~Arena() {
        for (void *block : blocks_) std::free(block);
    }
    template <class T>
    T *allocate(long count) {
        static_assert(sizeof(T) == 4, "the room at the end is counted in floats");
        const std::size_t bytes = std::size_t(round_up(count + LANES, 64 / 4)) * 4;
        if (bytes > left_) grow(bytes);
        T *array = reinterpret_cast<T *>(next_);
        next_ += bytes, left_ -= bytes;
        return array;
    }
    float *floats(long count) { return allocate<float>(count); }

private:
    static constexpr std::size_t HUGE_PAGE = std::size_t(1) << 21;

    void grow(std::size_t bytes) {
        const std::size_t size =
            std::max(bytes, 2 * HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE + HUGE_PAGE;
        blocks_.reserve(blocks_.size() + 1);
        char *block = static_cast<char *>(std::calloc(size + HUGE_PAGE, 1));
        if (!block) throw std::bad_alloc();
        blocks_.push_back(block);
        const auto end_of_page = reinterpret_cast<std::uintptr_t>(block) + HUGE_PAGE - 1;
        next_ = reinterpret_cast<char *>(end_of_page & ~(HUGE_PAGE - 1));
        left_ = size;
#ifdef __linux__
        // saves thousands of page faults per call; a refusal does no harm
        madvise(next_, size, MADV_HUGEPAGE);
#endif
    }

    std::vector<void *> blocks_;
    char *next_ = nullptr;
    std::size_t left_ = 0;
};

}  // namespace
