"""TVM: compiles ATen via Relax for its virtual machine. Only this package imports TVM."""
