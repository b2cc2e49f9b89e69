"""TVM: from ATen to Relax and on to its virtual machine. All that touches TVM lies here."""
