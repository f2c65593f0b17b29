// The two functions that lowered MLIR expects from its run time: memref.copy between strided memrefs, and float -> bf16.
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t rank;
    void *descriptor;
} UnrankedMemRef;

typedef struct {
    char *allocated, *aligned;
    int64_t offset;
    int64_t sizes_then_strides[];
} Descriptor;

void memrefCopy(int64_t element_bytes, UnrankedMemRef *source, UnrankedMemRef *target) {
    Descriptor *from = source->descriptor, *to = target->descriptor;
    int64_t rank = source->rank, index[8] = {0};
    int64_t *sizes = from->sizes_then_strides;
    int64_t *from_strides = sizes + rank, *to_strides = to->sizes_then_strides + rank;
    for (int64_t axis = 0; axis < rank; axis++)
        if (sizes[axis] <= 0) return;
    char *read = from->aligned + from->offset * element_bytes, *write = to->aligned + to->offset * element_bytes;
    for (;;) {
        int64_t read_at = 0, write_at = 0;
        for (int64_t axis = 0; axis < rank; axis++) {
            read_at += index[axis] * from_strides[axis];
            write_at += index[axis] * to_strides[axis];
        }
        memcpy(write + write_at * element_bytes, read + read_at * element_bytes, element_bytes);
        int64_t axis = rank - 1;
        while (axis >= 0 && ++index[axis] == sizes[axis]) index[axis--] = 0;
        if (axis < 0) return;
    }
}

__bf16 __truncsfbf2(float value) {
    union { float value; uint32_t bits; } in = {value};
    union { uint16_t bits; __bf16 value; } out;
    if ((in.bits & 0x7fffffff) > 0x7f800000)
        out.bits = (in.bits >> 16) | 0x40;  // stays a NaN
    else
        out.bits = (in.bits + 0x7fff + ((in.bits >> 16) & 1)) >> 16;  // nearest, ties to even
    return out.value;
}
