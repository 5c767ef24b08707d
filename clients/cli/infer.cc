#include <iostream>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "clients/cli/command.h"
#include "clients/cli/elements.h"
#include "clients/cli/file.h"
#include "clients/cli/input_files.h"
#include "clients/cli/npy.h"
#include "clients/cli/server.h"

namespace espalier::cli {
namespace {

using Metadata = inference::ModelMetadataResponse;
constexpr int64_t kShownItems = 10, kShownElements = 10;

absl::StatusOr<client::InferRequest> MakeRequest(const Args& args, const Metadata& metadata) {
  auto files = NamedValues(args, "input", metadata.inputs());
  if (!files.ok()) return files.status();
  auto shapes = NamedValues(args, "shape", metadata.inputs());
  if (!shapes.ok()) return shapes.status();
  absl::StatusOr<int64_t> limit = args.Int("limit", INT64_MAX, 1, INT64_MAX);
  if (!limit.ok()) return limit.status();
  client::InferRequest request{.model = metadata.name(), .version = args.String("version", "")};
  for (const TensorMetadata& input : metadata.inputs()) {
    const auto file = files->find(input.name());
    if (file == files->end()) {
      return WrongUsage(absl::StrCat("no file for input ", Describe(input), "; give --input ",
                                     input.name(), "=FILE"));
    }
    absl::StatusOr<client::Tensor> tensor =
        ReadInput(file->second, input, (*shapes)[input.name()], *limit);
    if (!tensor.ok()) return tensor.status();
    request.inputs.push_back(*std::move(tensor));
  }
  return request;
}

absl::Status PrintTop(const client::Tensor& output, int64_t top, JsonWriter* json) {
  absl::StatusOr<std::vector<double>> values = Numbers(output);
  if (!values.ok()) return values.status();
  const Items items = Items::Of(output);
  for (int64_t i = 0; i < items.count; ++i) {
    const double* item = values->data() + i * items.item_size;
    if (json != nullptr) json->BeginArray();
    std::string line = absl::StrCat("  ", i, ": ");
    for (int64_t index : TopIndices(item, items.item_size, top)) {
      const std::string text = Texts(output, i * items.item_size + index, 1)[0];
      absl::StrAppend(&line, " ", index, " (", text, ")");
      if (json != nullptr)
        json->BeginObject().Key("index").Int(index).Key("value").Number(item[index]).EndObject();
    }
    json != nullptr ? void(json->EndArray()) : void(std::cout << line << "\n");
  }
  return absl::OkStatus();
}

void PrintValues(const client::Tensor& output) {
  const Items items = Items::Of(output);
  const int64_t shown = std::min(items.item_size, kShownElements);
  for (int64_t i = 0; i < std::min(items.count, kShownItems); ++i) {
    std::cout << "  " << i << ":  " << absl::StrJoin(Texts(output, i * items.item_size, shown), " ")
              << (shown < items.item_size ? " …" : "") << "\n";
  }
  if (items.count > kShownItems || items.item_size > shown) {
    std::cout << "  … shortened; --json or --output FILE.npy has all\n";
  }
}

absl::Status PrintText(const client::InferResult& result, int64_t top) {
  std::cout << result.model << " version " << result.version << "\n";
  for (const client::Tensor& output : result.outputs) {
    std::cout << output.name << " " << output.datatype << " [" << absl::StrJoin(output.shape, ", ")
              << "]"
              << (top > 0 ? absl::StrCat(", the ", top, " largest of each item: index (value)")
                          : "")
              << "\n";
    if (top == 0) {
      PrintValues(output);
    } else if (absl::Status status = PrintTop(output, top, nullptr); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status PrintJson(const client::InferResult& result, int64_t top) {
  JsonWriter json;
  json.BeginObject().Key("model").String(result.model).Key("version").String(result.version);
  json.Key("outputs").BeginArray();
  for (const client::Tensor& output : result.outputs) {
    json.BeginObject().Key("name").String(output.name).Key("datatype").String(output.datatype);
    json.Key("shape").BeginArray();
    for (int64_t dim : output.shape) json.Int(dim);
    json.EndArray().Key(top > 0 ? "top" : "data").BeginArray();
    if (top == 0) {
      WriteElements(output, json);
    } else if (absl::Status status = PrintTop(output, top, &json); !status.ok()) {
      return status;
    }
    json.EndArray().EndObject();
  }
  std::cout << json.EndArray().EndObject().text() << "\n";
  return absl::OkStatus();
}

absl::Status WriteOutputs(const client::InferResult& result,
                          const std::map<std::string, std::string>& files) {
  for (const auto& [name, path] : files) {
    absl::StatusOr<const client::Tensor*> output = result.output(name);
    if (!output.ok()) return output.status();
    absl::StatusOr<std::string> content = FormatNpy(**output);
    if (!content.ok()) return content.status();
    if (absl::Status status = WriteFile(path, *content); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Run(const Args& args) {
  absl::StatusOr<int64_t> top = args.Int("top", 0, 1, 1 << 20);
  if (!top.ok()) return top.status();
  absl::StatusOr<Server> server = Connect(args);
  if (!server.ok()) return server.status();
  auto metadata = server->client->ModelMetadata(args.positional()[0], args.String("version", ""));
  if (!metadata.ok()) return server->Explain(metadata.status());
  auto files = NamedValues(args, "output", metadata->outputs());
  if (!files.ok()) return files.status();
  absl::StatusOr<client::InferRequest> request = MakeRequest(args, *metadata);
  if (!request.ok()) return request.status();
  absl::StatusOr<client::InferResult> result = server->client->Infer(*request);
  if (!result.ok()) return server->Explain(result.status());
  if (absl::Status status = WriteOutputs(*result, *files); !status.ok()) return status;
  return args.Has("json") ? PrintJson(*result, *top) : PrintText(*result, *top);
}

}  // namespace

Command InferCommand() {
  return {
      {.name = "infer",
       .summary = "send files to a model of a server, print or save its outputs",
       .arguments = "MODEL",
       .min_positional = 1,
       .max_positional = 1,
       .flags = WithServerFlags({
           {"input", "[NAME=]FILE",
            "A file for an input: .npy as NumPy saves it; IDX images (plain or gzipped, sent as "
            "FP32,\n"
            "byte / 255); anything else as raw little-endian elements of the input's datatype.\n"
            "The name may be left out when the model has one input.",
            true},
           {"shape", "[NAME=]1,784",
            "The file is raw and has this shape. Default: as the model says.", true},
           {"limit", "N", "Send only the first N items of each file. Default: all."},
           {"version", "N", "Version of the model. Default: the one that the server serves."},
           {"output", "[NAME=]FILE", "Also write an output as .npy.", true},
           {"top", "K",
            "Print the K largest values of each item, with their indices, instead of all values."},
           {"json", "", "Print JSON, with every value."},
       }),
       .details = R"(Examples:
  espalier infer mnist_diagonal16 --input tests/data/mnist/t10k-images-idx3-ubyte.gz --limit 3 --top 1
  espalier infer mnist_dense --input input=digits.npy --output logits=logits.npy
  espalier infer mnist_dense --input digit.f32 --json)"},
      &Run};
}

}  // namespace espalier::cli
