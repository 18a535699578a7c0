# What Terraform knows of a cycle's settings, said once. The driver and the watch get it as TRNPIPE_ variables, people
# as the output `settings`: terraform output -json settings > build/infra.json; trnjobs submit --config build/infra.json.

locals {
  # [jobs]
  job_settings = {
    name             = var.name
    target           = "batch"
    image            = var.image
    queue            = module.queues.trainium_queue.name
    share_identifier = var.share_identifier
    log_group        = module.storage.log_group
    role             = module.roles.train_role_arn
    sla_s            = var.sla_s
  }

  # Work without Trainium.
  on_cpu = { queue = module.queues.cpu_queue.name, image = var.cpu_image }

  # [jobs.schedule], [jobs.environment] and [jobs.<stage>]
  job_sections = {
    schedule    = { expression = var.schedule_expression, timezone = var.timezone }
    environment = merge({ AWS_DEFAULT_REGION = var.region }, var.job_environment) # not confirmed that AWS Batch sets a region on EC2
    prepare     = local.on_cpu
    mine        = merge(local.on_cpu, { role = module.roles.embed_role_arn })
    teach       = local.on_cpu
    evaluate    = { role = module.roles.promote_role_arn }
    embed       = merge({ for key, value in local.on_cpu : key => value if !var.embed_on_trainium }, { role = module.roles.embed_role_arn })
    verify      = merge(local.on_cpu, { role = module.roles.embed_role_arn })
    report      = merge(local.on_cpu, { role = module.roles.report_role_arn })
  }

  # [jobs.sagemaker], for --target sagemaker.
  sagemaker = var.sagemaker ? { sagemaker = module.sagemaker[0].settings } : {}

  settings = {
    workspace = module.storage.workspace
    jobs      = merge(local.job_settings, local.job_sections, local.sagemaker)
  }

  environment = merge(
    { AWS_DEFAULT_REGION = var.region, TRNPIPE_WORKSPACE = module.storage.workspace },
    { for key, value in local.job_settings : "TRNPIPE_JOBS__${upper(key)}" => tostring(value) },
    merge([for section, values in local.job_sections : { for key, value in values :
      "TRNPIPE_JOBS__${upper(section)}__${upper(key)}" => value
    } if section != "environment"]...),
    { TRNPIPE_JOBS__ENVIRONMENT = jsonencode(local.job_sections.environment) }, # as one value, because its names may contain __
    { for key, value in try(local.sagemaker.sagemaker, {}) : "TRNPIPE_JOBS__SAGEMAKER__${upper(key)}" => try(tostring(value), jsonencode(value)) },
  )
}
