/* True values on the stand-in for CUDA: the CPU's kernel of aten in place of every CUDA kernel, on the same bytes.

   Device memory is memory of this process: a tensor of the device can be seen as one of the host. Operators that have
   no CPU kernel keep their CUDA kernel, which does nothing; hook/standin_values.py has those that matter. True: values
   in eager mode, as the CPU rounds them. Not true: compiled code, graphs, random numbers of the GPU's generator. */
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

using at::Tensor;
using c10::IValue;

namespace {

/* The same bytes, seen from the host. The alias keeps the tensor alive. */
Tensor on_host(const Tensor& tensor) {
    auto options = tensor.options().device(at::kCPU).requires_grad(false);
    if (tensor.numel() == 0)
        return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    auto keep = [tensor](void*) {};
    Tensor alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), keep, options);
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    return alias;
}

/* A new tensor of the device with the values of one of the host. */
Tensor on_device(const Tensor& tensor, at::Device device) {
    if (!tensor.defined() || !tensor.device().is_cpu())
        return tensor;
    Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    auto options = dense.options().device(device).pinned_memory(false);
    Tensor made = at::empty_strided(dense.sizes(), dense.strides(), options);
    if (dense.numel())
        std::memcpy(made.data_ptr(), dense.data_ptr(), dense.numel() * dense.element_size());
    return made;
}

/* One call of an operator: its tensors of the device, and what stands for them on the host. */
class Call {
  public:
    explicit Call(const c10::OperatorHandle& op) : op(op) {}

    void run(torch::jit::Stack* stack) {
        const auto& arguments = op.schema().arguments();
        const size_t first = stack->size() - arguments.size();
        for (size_t i = 0; i < arguments.size(); i++)
            (*stack)[first + i] = argument((*stack)[first + i], arguments[i].name());
        op.callBoxed(*stack);
        resize_outputs();
        const size_t num_returns = op.schema().returns().size();
        for (size_t i = stack->size() - num_returns; i < stack->size(); i++)
            (*stack)[i] = result((*stack)[i]);
    }

  private:
    /* A tensor that an operator is given twice is the same one on the host, too. */
    Tensor down(const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cuda())
            return tensor;
        device = tensor.device();
        for (auto& [original, alias] : pairs)
            if (original.is_same(tensor))
                return alias;
        pairs.emplace_back(tensor, on_host(tensor));
        return pairs.back().second;
    }

    /* What the operator returns is the tensor that it was given, if it was given it. */
    Tensor up(const Tensor& tensor) {
        if (!tensor.defined())
            return tensor;
        for (auto& [original, alias] : pairs)
            if (alias.is_same(tensor))
                return original;
        return on_device(tensor, device);
    }

    IValue argument(const IValue& value, const std::string& name) {
        if (value.isTensor())
            return down(value.toTensor());
        if (value.isTensorList()) {
            std::vector<Tensor> list;
            for (const Tensor& tensor : value.toTensorVector())
                list.push_back(down(tensor));
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> list;
            for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
                list.push_back(tensor ? std::optional<Tensor>(down(*tensor)) : tensor);
            return list;
        }
        if (value.isDevice()) {
            if (value.toDevice().is_cuda())
                device = value.toDevice();
            return at::Device(at::kCPU);
        }
        if (value.isBool() && name == "pin_memory")
            return false;
        if (value.isGenerator()) /* that of the device, which no CPU kernel takes */
            return IValue();
        return value;
    }

    IValue result(const IValue& value) {
        if (value.isTensor())
            return up(value.toTensor());
        if (value.isTensorList()) {
            std::vector<Tensor> list;
            for (const Tensor& tensor : value.toTensorVector())
                list.push_back(up(tensor));
            return list;
        }
        return value;
    }

    /* An output that the operator has resized has its bytes on the host: its original is resized and gets them. */
    void resize_outputs() {
        for (auto& [original, alias] : pairs) {
            bool was_empty = original.numel() == 0 && alias.numel();
            if (alias.sizes() == original.sizes() && !was_empty)
                continue;
            original.resize_(alias.sizes());
            if (alias.numel())
                on_host(original).copy_(alias);
        }
    }

    const c10::OperatorHandle& op;
    at::Device device = at::Device(at::kCUDA, 0);
    std::vector<std::pair<Tensor, Tensor>> pairs;
};

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    Call(op).run(stack);
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
    TORCH_CHECK(false, "the stand-in for CUDA has no values of ", op.operator_name(), " (no GPU computes)");
}

/* Operators whose own CUDA kernel is right: they make memory, see it another way, or copy it; and those that
   hook/standin_values.py has. */
bool keeps_its_kernel(const std::string& name) {
    static const std::set<std::string> kept = {
        "aten::empty", "aten::empty_strided", "aten::_empty_affine_quantized", "aten::resize_", "aten::set_",
        "aten::is_set_to", "aten::as_strided", "aten::view", "aten::view_as_real", "aten::view_as_complex",
        "aten::_reshape_alias", "aten::unfold", "aten::_copy_from", "aten::_to_copy", "aten::_local_scalar_dense",
        "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::_fused_sdp_choice",
        "aten::_flash_attention_forward", "aten::_flash_attention_backward", "aten::_efficient_attention_forward",
        "aten::_efficient_attention_backward", "aten::_cudnn_attention_forward",
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_backward",
    };
    return kept.count(name) != 0;
}

torch::Library* new_library(const char* space) {
    /* Never deleted: the kernels stay as long as the process. */
    return new torch::Library(torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
}

std::string name_within(const c10::OperatorName& name, size_t begin) {
    std::string own = name.name.substr(begin);
    return name.overload_name.empty() ? own : own + "." + name.overload_name;
}

} // namespace

/* After torch is loaded: the CPU computes aten's operators for CUDA. Returns their number. */
extern "C" int standin_values() {
    const std::string begin = "aten::";
    auto* library = new_library("aten");
    int count = 0;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind(begin, 0) != 0 || keeps_its_kernel(name.name))
            continue;
        auto op = c10::Dispatcher::singleton().findOp(name);
        if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) ||
            !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
            continue;
        auto kernel = torch::CppFunction::makeFromBoxedFunction<&compute_on_host>();
        library->impl(name_within(name, begin.size()).c_str(), std::move(kernel));
        count++;
    }
    /* Of no CUDA kernel by itself, but where one is done between the devices. */
    library->impl("copy_", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
    return count;
}

/* Operators of another library that have a kernel for CUDA stop by name, but for the names in `except`, which are
   separated by commas: a value that nothing computed looks like any other. Returns their number. */
extern "C" int standin_refuse(const char* space, const char* except) {
    const std::string begin = std::string(space) + "::";
    const std::string kept = "," + std::string(except) + ",";
    auto* library = new_library(space);
    int count = 0;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind(begin, 0) != 0)
            continue;
        if (kept.find("," + name.name.substr(begin.size()) + ",") != std::string::npos)
            continue;
        auto op = c10::Dispatcher::singleton().findOp(name);
        if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))
            continue;
        auto kernel = torch::CppFunction::makeFromBoxedFunction<&refuse>();
        library->impl(name_within(name, begin.size()).c_str(), std::move(kernel));
        count++;
    }
    return count;
}
