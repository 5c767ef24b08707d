#include "tests/bench/onednn_baseline.h"

#include <dnnl.hpp>

extern "C" void omp_set_num_threads(int);  // from the libgomp that oneDNN brings

namespace espalier::bench {

using dnnl::memory;

struct OneDnnDense::State {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  memory x, weight, bias, y;
  dnnl::primitive primitive;
};

const char* OneDnnDense::NameOf(Form form) {
  constexpr const char* kNames[] = {"onednn_matmul", "onednn_inner_product", "onednn_plain"};
  return kNames[static_cast<int>(form)];
}

OneDnnDense::OneDnnDense(Form form, const std::vector<float>& weight, const float* bias,
                         int64_t out, int64_t in, int64_t tokens)
    : state_(std::make_unique<State>()) {
  omp_set_num_threads(1);
  State& s = *state_;
  const auto f32 = memory::data_type::f32;
  const memory::desc x({tokens, in}, f32, memory::format_tag::ab),
      y({tokens, out}, f32, memory::format_tag::ab);
  memory::desc chosen, plain, bias_desc;
  if (form == Form::kInnerProductPacked) {
    plain = memory::desc({out, in}, f32, memory::format_tag::ab);
    bias_desc = memory::desc({out}, f32, memory::format_tag::a);
    const dnnl::inner_product_forward::primitive_desc desc(
        {dnnl::prop_kind::forward_inference, x,
         memory::desc({out, in}, f32, memory::format_tag::any), bias_desc, y},
        s.engine);
    chosen = desc.weights_desc();
    s.primitive = dnnl::inner_product_forward(desc);
  } else {
    plain = memory::desc({in, out}, f32,
                         memory::format_tag::ba);  // [out, in] row-major seen as [in, out]
    bias_desc = memory::desc({1, out}, f32, memory::format_tag::ab);
    const memory::desc any({in, out}, f32, memory::format_tag::any);
    const dnnl::matmul::primitive_desc desc(
        {x, form == Form::kMatmulPlain ? plain : any, bias_desc, y}, s.engine);
    chosen = desc.weights_desc();
    s.primitive = dnnl::matmul(desc);
  }
  memory from(plain, s.engine, const_cast<float*>(weight.data()));
  s.weight = memory(chosen, s.engine);
  dnnl::reorder(from, s.weight).execute(s.stream, from, s.weight);
  s.bias = memory(bias_desc, s.engine, const_cast<float*>(bias));
  s.x = memory(x, s.engine, nullptr);
  s.y = memory(y, s.engine, nullptr);
  s.stream.wait();
}

OneDnnDense::~OneDnnDense() = default;

void OneDnnDense::Run(const float* x, float* y) {
  State& s = *state_;
  s.x.set_data_handle(const_cast<float*>(x));
  s.y.set_data_handle(y);
  s.primitive.execute(s.stream, {{DNNL_ARG_SRC, s.x},
                                 {DNNL_ARG_WEIGHTS, s.weight},
                                 {DNNL_ARG_BIAS, s.bias},
                                 {DNNL_ARG_DST, s.y}});
  s.stream.wait();
}

}  // namespace espalier::bench
