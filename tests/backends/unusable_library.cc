// A stand-in for the native library: its operators name version 0.FFI_MINOR of XLA's FFI as their own, and fail when called.
#include "xla/ffi/api/c_api.h"

static XLA_FFI_Error *handle(XLA_FFI_CallFrame *frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = reinterpret_cast<XLA_FFI_Metadata_Extension *>(frame->extension_start)->metadata;
    metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, FFI_MINOR};
    metadata->traits = 0, metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  XLA_FFI_Error_Create_Args error{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, "the operator fails",
                                  XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&error);
}

extern "C" {
XLA_FFI_Error *ChunkattnAttention(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnAttendHeads(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnGroups(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnPackedGroups(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnFactors(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnGate(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnLargest(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnNorm(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnMultiplySeveral(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnMultiply(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnPackedMultiply(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnPackedGather(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnRecurrence(XLA_FFI_CallFrame *frame) { return handle(frame); }
XLA_FFI_Error *ChunkattnNormalise(XLA_FFI_CallFrame *frame) { return handle(frame); }
#ifndef OLD
XLA_FFI_Error *ChunkattnRead(XLA_FFI_CallFrame *frame) { return handle(frame); }
#endif
const char *chunkattn_use(const char *) { return nullptr; }
const char *chunkattn_kernel() { return "amx"; }
const char *chunkattn_packed_kernel() { return "portable"; }
bool chunkattn_pack() { return false; }
void chunkattn_quantize_q8_0() {}
#ifdef BROKEN
int of_no_library();
const char *chunkattn_sources() { return of_no_library() ? SOURCES : nullptr; }
#else
const char *chunkattn_sources() { return SOURCES; }
#endif
}
