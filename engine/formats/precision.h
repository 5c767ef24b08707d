// precision.h — what a model's setting of that name may say (model_settings.h).
#pragma once

namespace espalier::formats {

enum class Precision { kAsStored, kFloat32, kBFloat16 };

}  // namespace espalier::formats
