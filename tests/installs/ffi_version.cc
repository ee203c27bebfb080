// Prints the version of XLA's FFI that the operators of a native library were compiled for.
#include <dlfcn.h>

#include <cstdio>

#include "xla/ffi/api/c_api.h"

int main(int, char **arguments) {
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return puts(dlerror()), 1;
  auto *handler = reinterpret_cast<XLA_FFI_Handler *>(dlsym(library, "ChunkattnAttention"));
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  handler(&frame);
  printf("%d.%d\n", metadata.api_version.major_version, metadata.api_version.minor_version);
}
