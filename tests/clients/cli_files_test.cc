#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <cstdio>
#include <random>

#include "absl/strings/str_cat.h"
#include "clients/cli/file.h"
#include "clients/cli/idx.h"
#include "clients/cli/npy.h"

namespace espalier::cli {
namespace {

using client::Tensor;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string NpyWith(const std::string& header, const std::string& data, int major = 1) {
  std::string text("\x93NUMPY", 6);
  text += {static_cast<char>(major), 0, static_cast<char>(header.size() & 0xFF),
           static_cast<char>(header.size() >> 8)};
  if (major > 1) text += std::string(2, '\0');
  return text + header + data;
}

std::string ErrorOf(const std::string& npy) {
  absl::StatusOr<Tensor> tensor = ParseNpy(npy, "x.npy");
  EXPECT_EQ(tensor.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(tensor.status().message()), HasSubstr("x.npy"));
  return std::string(tensor.status().message());
}

constexpr char kGood[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }  \n";
const std::string kEightBytes = "abcdefgh";

TEST(NpyTest, WhatNumpyWritesIsRead) {
  for (int major : {1, 2, 3}) {
    auto tensor = ParseNpy(NpyWith(kGood, kEightBytes, major), "x.npy");
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->datatype, "FP32");
    EXPECT_THAT(tensor->shape, ElementsAre(1, 2));
    EXPECT_EQ(tensor->bytes, kEightBytes);
  }
}

TEST(NpyTest, ScalarsVectorsAndEmptyArraysAreRead) {
  const auto shape = [](const char* text, const std::string& data) {
    return ParseNpy(NpyWith(absl::StrCat("{'descr': '<i8', 'fortran_order': False, 'shape': ", text,
                                         "}"),
                            data),
                    "x")
        ->shape;
  };
  EXPECT_THAT(shape("()", kEightBytes), ElementsAre());
  EXPECT_THAT(shape("(1,)", kEightBytes), ElementsAre(1));
  EXPECT_THAT(shape("(0, 7)", ""), ElementsAre(0, 7));
}

TEST(NpyTest, EveryDatatypeButBytesSurvivesTheRoundTrip) {
  for (const char* datatype : {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16",
                               "INT32", "INT64", "FP16", "FP32", "FP64", "BF16"}) {
    Tensor tensor{
        "x", datatype, {2, 3}, std::string(6 * client::ElementBytes(datatype).value(), '\1')};
    auto content = FormatNpy(tensor);
    ASSERT_TRUE(content.ok()) << content.status();
    EXPECT_EQ((content->size() - tensor.bytes.size()) % 64, 0u)
        << "data is aligned as NumPy aligns it";
    auto read = ParseNpy(*content, "x.npy");
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->datatype, datatype);
    EXPECT_EQ(read->shape, tensor.shape);
    EXPECT_EQ(read->bytes, tensor.bytes);
  }
  EXPECT_THAT(std::string(FormatNpy({"x", "BYTES", {0}, ""}).status().message()),
              HasSubstr("--json"));
}

TEST(NpyTest, SizeThatDisagreesWithTheShapeIsRefused) {
  EXPECT_THAT(ErrorOf(NpyWith(kGood, "abcdefg")),
              HasSubstr("needs 2 elements of 4 bytes; got 7 bytes"));
  EXPECT_THAT(ErrorOf(NpyWith(kGood, kEightBytes + "i")), HasSubstr("got 9 bytes"));
}

TEST(NpyTest, HostileShapesAreRefusedWithoutReservingMemory) {
  const auto error = [](const std::string& shape) {
    return ErrorOf(
        NpyWith("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + "}", kEightBytes));
  };
  EXPECT_THAT(error("(4611686018427387904, 4)"), HasSubstr("too large"));
  EXPECT_THAT(error("(4611686018427387904,)"), HasSubstr("got 8 bytes"));
  EXPECT_THAT(error("(99999999999999999999,)"), HasSubstr("malformed header"));
  EXPECT_THAT(error("(-1,)"), HasSubstr("malformed header"));
  EXPECT_THAT(error("(1 2)"), HasSubstr("malformed header"));
  std::string many = "(";
  for (int i = 0; i < 33; ++i) many += "1,";
  EXPECT_THAT(error(many + ")"), HasSubstr("malformed header"));
}

TEST(NpyTest, HeadersThatAreNotTheOneDictionaryAreRefused) {
  for (const char* header :
       {"", "{}", "{'descr': '<f4'}", "[]",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)} x",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1, 2)}",
        "{'descr': '<f4', 'fortran_order': None, 'shape': (1, 2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), 'more': 1}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1, 2)}", "{'descr': '<f4",
        "{'descr': "}) {
    EXPECT_THAT(ErrorOf(NpyWith(header, kEightBytes)), HasSubstr("malformed header")) << header;
  }
}

TEST(NpyTest, ErrorsSayWhatToDo) {
  EXPECT_THAT(
      ErrorOf(NpyWith("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2)}", kEightBytes)),
      HasSubstr("ascontiguousarray"));
  EXPECT_THAT(
      ErrorOf(NpyWith("{'descr': '>f4', 'fortran_order': False, 'shape': (1, 2)}", kEightBytes)),
      HasSubstr("newbyteorder"));
  EXPECT_THAT(
      ErrorOf(NpyWith("{'descr': '|O', 'fortran_order': False, 'shape': (1, 2)}", kEightBytes)),
      HasSubstr("astype"));
  EXPECT_THAT(ErrorOf(NpyWith(kGood, kEightBytes, 9)), HasSubstr("version 9"));
  EXPECT_THAT(ErrorOf("PK\3\4"), HasSubstr("wrong magic"));
}

TEST(NpyTest, EveryPrefixAndEveryFlippedByteIsRefusedOrRead) {
  const std::string good = NpyWith(kGood, kEightBytes);
  for (size_t i = 0; i < good.size(); ++i) EXPECT_FALSE(ParseNpy(good.substr(0, i), "x").ok()) << i;
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = good;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    if (auto tensor = ParseNpy(damaged, "x"); tensor.ok()) {
      EXPECT_TRUE(client::CheckTensor(*tensor).ok());
    }
  }
}

class IdxTest : public ::testing::Test {
 protected:
  ~IdxTest() override { std::remove(path_.c_str()); }
  // Writes `content`, gzipped unless told otherwise, and returns what ReadIdx makes of it.
  absl::StatusOr<IdxFile> Read(const std::string& content, bool gzip = true) {
    if (gzip) {
      gzFile file = gzopen(path_.c_str(), "wb");
      gzwrite(file, content.data(), static_cast<unsigned>(content.size()));
      gzclose(file);
    } else {
      EXPECT_TRUE(WriteFile(path_, content).ok());
    }
    return ReadIdx(path_);
  }
  static std::string Header(std::vector<uint32_t> sizes) {
    std::string header{0, 0, 8, static_cast<char>(sizes.size())};
    for (uint32_t size : sizes) {
      for (int shift = 24; shift >= 0; shift -= 8)
        header.push_back(static_cast<char>(size >> shift));
    }
    return header;
  }

  std::string path_ = absl::StrCat(::testing::TempDir(), "/idx_test_", getpid());
};

TEST_F(IdxTest, PlainAndGzippedFilesReadTheSame) {
  for (bool gzip : {false, true}) {
    auto idx = Read(Header({2, 1, 3}) + "abcdef", gzip);
    ASSERT_TRUE(idx.ok()) << idx.status();
    EXPECT_THAT(idx->shape, ElementsAre(2, 1, 3));
    EXPECT_EQ(idx->bytes, "abcdef");
    EXPECT_EQ(idx->items(), 2);
    EXPECT_EQ(idx->item_bytes(), 3);
    EXPECT_TRUE(IsIdx(path_));
  }
}

TEST_F(IdxTest, TheShippedTestSetIsRead) {
  auto images = ReadIdx("tests/data/mnist/t10k-images-idx3-ubyte.gz");
  ASSERT_TRUE(images.ok()) << images.status();
  EXPECT_THAT(images->shape, ElementsAre(10000, 28, 28));
  auto labels = ReadIdx("tests/data/mnist/t10k-labels-idx1-ubyte.gz");
  ASSERT_TRUE(labels.ok()) << labels.status();
  EXPECT_THAT(labels->shape, ElementsAre(10000));
}

TEST_F(IdxTest, MoreOrFewerBytesThanAnnouncedAreRefused) {
  EXPECT_THAT(std::string(Read(Header({2, 3}) + "abcde").status().message()),
              HasSubstr("6 bytes; got 5"));
  EXPECT_THAT(std::string(Read(Header({2, 3}) + "abcdefg").status().message()),
              HasSubstr("6 bytes; got more"));
  EXPECT_THAT(std::string(Read(Header({2, 3}).substr(0, 7)).status().message()),
              HasSubstr("cut off"));
}

TEST_F(IdxTest, HostileSizesAreRefused) {
  EXPECT_EQ(Read(Header({0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF})).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Read(Header({0xFFFFFFFF})).status().code(), absl::StatusCode::kResourceExhausted);
  // Below the cap, but not there: refused after reading what is there.
  EXPECT_EQ(Read(Header({1 << 29})).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(IdxTest, OtherFilesAreRefused) {
  for (const std::string& content :
       {std::string(), std::string("abcd"), std::string("\0\0\x0D\1\0\0\0\0", 8),
        std::string("\0\0\x08\0", 4), std::string("\0\0\x08\5", 4)}) {
    EXPECT_THAT(std::string(Read(content).status().message()), HasSubstr("not an IDX file"));
    EXPECT_FALSE(IsIdx(path_));
  }
  EXPECT_EQ(ReadIdx("/nonexistent/file").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(IdxTest, DamagedGzipStreamsAreRefused) {
  std::string noise(50000, '\0');
  std::mt19937 random(2);
  for (char& c : noise) c = static_cast<char>(random());
  ASSERT_TRUE(Read(Header({50000}) + noise).ok());
  const std::string good = ReadFile(path_).value();
  EXPECT_FALSE(Read(good.substr(0, good.size() / 2), /*gzip=*/false).ok()) << "cut off";
  EXPECT_FALSE(Read(good.substr(0, good.size() - 4), /*gzip=*/false).ok()) << "without its length";
  std::string flipped = good;
  flipped[good.size() - 6] ^= 1;  // in the checksum
  EXPECT_FALSE(Read(flipped, /*gzip=*/false).ok()) << "wrong checksum";
}

TEST(FileTest, FilesAboveTheCapAreRefused) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/file_test_", getpid());
  ASSERT_TRUE(WriteFile(path, "12345").ok());
  EXPECT_EQ(*ReadFile(path, 5), "12345");
  EXPECT_EQ(ReadFile(path, 4).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReadFile("/dev/zero", 1 << 20).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReadFile(::testing::TempDir()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFile(path + ".missing").status().code(), absl::StatusCode::kNotFound);
  std::remove(path.c_str());
}

TEST(FileTest, AFullDiskIsAnError) {
  EXPECT_FALSE(WriteFile("/dev/full", std::string(1 << 20, 'x')).ok());
  EXPECT_FALSE(WriteFile("/nonexistent/file", "x").ok());
}

}  // namespace
}  // namespace espalier::cli
